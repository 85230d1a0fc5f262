"""The extension of vLLM's worker gives the model runner each version whole, once; a stub stands for the runner of vLLM 0.33.

Several workers: `test_held_weights`.
"""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tests.feed.versions import REF, State, equal, first_state, save, train
from tests.integrations import vllm_stub


class ModelRunner:
    """`GPUModelRunner.reload_weights`, as far as the extension calls it."""

    def __init__(self) -> None:
        self.loads: list[State] = []
        self.fails = False

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        assert weights_iterator is not None
        assert weights_path is None
        assert is_checkpoint_format
        if self.fails:
            raise RuntimeError("out of memory")
        self.loads.append({"model": {name: tensor.clone() for name, tensor in weights_iterator}})


def test_each_version_is_loaded_once_and_again_where_it_failed(tmp_path: Path) -> None:
    with vllm_stub.installed():
        module: Any = importlib.import_module("examples.vllm_follower")
    state, workers = first_state(), [module.Follower(), module.Follower()]
    with tsck.open(tmp_path, create=True) as trainer:
        roots = [save(trainer, state, 0).root]
        for worker in workers:
            worker.model_runner = ModelRunner()
            worker.follow(str(tmp_path), REF, "model.")
        for step in (0, 1):
            for worker in workers:
                worker.stage(roots[step])
                assert worker.swap() == step
                assert worker.swap() == step
                assert len(worker.model_runner.loads) == step + 1
                assert equal(worker.model_runner.loads[-1], state)
            train(state, step)
            roots.append(save(trainer, state, step + 1).root)
        worker = workers[0]
        worker.stage(roots[2])
        worker.model_runner.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            worker.swap()
        worker.model_runner.fails = False
        worker.stage(roots[1])  # the runner has some weights of version 2
        assert worker.swap() == 1
        assert len(worker.model_runner.loads) == 3
        worker.stage(roots[2])
        assert worker.swap() == 2
        assert equal(worker.model_runner.loads[-1], state)
    for worker in workers:
        worker.held.store.close()


def test_engines_that_share_the_world_are_workers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with vllm_stub.installed():
        module: Any = importlib.import_module("examples.vllm_follower")
    assert module.engine_workers() is vllm_stub.GROUPS["world"]
    monkeypatch.setitem(vllm_stub.GROUPS, "dp", vllm_stub.GroupCoordinator(world_size=2))
    assert module.engine_workers() is vllm_stub.GROUPS["tp"]
