"""A store, and the run that nothing disturbed."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import tensorstore_ck as tsck
from tests.integrations.hf import runs


class Undisturbed(NamedTuple):
    losses: runs.Losses
    weights: dict[str, torch.Tensor]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as opened:
        yield opened


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """By transformers alone, without a store."""
    trainer = runs.native(tmp_path_factory.mktemp("undisturbed"))
    trainer.train()
    return Undisturbed(runs.losses(trainer), runs.weights(trainer))
