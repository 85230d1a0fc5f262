"""The run that nothing disturbed."""

from typing import NamedTuple

import pytest
import torch

from tests.integrations.hf import runs


class Undisturbed(NamedTuple):
    losses: runs.Losses
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """By transformers alone, without a store."""
    trainer = runs.native(tmp_path_factory.mktemp("undisturbed"))
    trainer.train()
    return Undisturbed(runs.losses(trainer), runs.weights(trainer))
