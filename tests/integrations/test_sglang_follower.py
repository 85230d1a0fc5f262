"""The custom weight loader of SGLang: called as `WeightUpdater.update_weights_from_tensor` of SGLang 0.5.23 calls it.

Several workers: `test_held_weights`.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tensorstore_ck as tsck
from tests.feed.versions import REF, State, equal, first_state, save, train

WORKERS: Any = SimpleNamespace(world_size=1)


def get_tp_group() -> Any:
    return WORKERS


@contextmanager
def sglang() -> Iterator[Any]:
    """The example, where this stands for SGLang."""
    made = {name: ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.distributed")}
    made["sglang.srt.distributed"].get_tp_group = get_tp_group  # type: ignore[attr-defined]
    with patch.dict(sys.modules, made):
        sys.modules.pop("examples.sglang_follower", None)
        yield importlib.import_module("examples.sglang_follower")


class Model:
    """`load_weights`, as SGLang's models have it."""

    def __init__(self) -> None:
        self.loads: list[State] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads.append({"model": {name: tensor.clone() for name, tensor in weights}})


class WeightUpdater:
    """One tensor-parallel rank."""

    def __init__(self, custom_weight_loaders: list[str]) -> None:
        self.custom_weight_loaders = custom_weight_loaders
        self.model = Model()

    def update_weights_from_tensor(self, named_tensors: list[tuple[str, torch.Tensor]], load_format: str) -> tuple[bool, str]:
        named_tensors = [(name, tensor.to("cpu")) for name, tensor in named_tensors]
        assert load_format in self.custom_weight_loaders
        module, _, function = load_format.rpartition(".")  # dynamic_import
        getattr(importlib.import_module(module), function)(self.model, named_tensors)
        return True, "Success"


def test_each_update_is_loaded_also_of_the_version_that_is_there(tmp_path: Path) -> None:
    loader = "examples.sglang_follower.load"
    updater, state = WeightUpdater([loader]), first_state()
    with sglang() as sglang_follower, tsck.open(tmp_path, create=True) as trainer:
        for step in range(3):
            root = save(trainer, state, step).root
            version = sglang_follower.named(str(tmp_path), REF, root, prefix="model.")
            for _ in range(2):
                assert updater.update_weights_from_tensor(version, loader) == (True, "Success")
            assert len(updater.model.loads) == 2 * (step + 1)
            assert equal(updater.model.loads[-1], state)
            train(state, step)
        with pytest.raises(ValueError, match="pass what `named` returns"):
            updater.update_weights_from_tensor([("weight", torch.ones(2))], loader)
        sglang_follower.held_weights(str(tmp_path), REF, "model.", None).store.close()
        sglang_follower.held_weights.cache_clear()
