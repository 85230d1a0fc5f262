"""The example runs, and continues."""

from pathlib import Path

import pytest

from examples import lightning_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_it_continues(tmp_path: Path) -> None:
    whole = lightning_trainer.main(tmp_path / "whole", 2)
    lightning_trainer.main(tmp_path / "cut", 1)
    assert lightning_trainer.main(tmp_path / "cut", 2) == whole
