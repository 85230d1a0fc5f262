"""The run that nothing disturbed."""

from typing import NamedTuple

import pytest
import torch

from tests.integrations.lightning import runs

QUIET = [
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),  # what Lightning says of torch, of itself and of these small runs
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital':UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter:UserWarning"),
]


class Undisturbed(NamedTuple):
    logged: runs.Logged
    weights: dict[str, torch.Tensor]
    seen: list[tuple[int, float]]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """By Lightning alone, without a store."""
    module = runs.seeded()
    trainer = runs.trainer(tmp_path_factory.mktemp("undisturbed"), enable_checkpointing=False)
    trainer.fit(module)
    return Undisturbed(runs.logged(trainer), runs.weights(module), module.seen)
