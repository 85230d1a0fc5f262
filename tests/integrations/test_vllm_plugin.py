"""The plugin's loader, weight transfer and adapters do what vLLM 0.33 asks of such classes; a stub with its signatures calls them."""

import asyncio
import importlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tests.feed.versions import REF, State, equal, first_state, save, train
from tests.integrations import vllm_stub


class Model:
    """`load_weights`, as vLLM's models have it."""

    def __init__(self) -> None:
        self.loaded: State = {"model": {}}
        self.fails = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for number, (name, tensor) in enumerate(weights):
            if self.fails and number == 1:
                raise RuntimeError("out of memory")
            self.loaded["model"][name] = tensor.clone()
        return set(self.loaded["model"])


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TSCK_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("TSCK_LORA_FOLDER", str(tmp_path / "adapters"))
    with vllm_stub.installed():
        plugin = importlib.import_module("examples.vllm_plugin")
        plugin.register()
        plugin.register()  # vLLM may load plugins several times
        yield


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(tmp_path / "store", create=True) as store:
        yield store


@pytest.mark.usefixtures("registered")
def test_the_loader_gives_the_model_the_snapshot(trainer: tsck.Store, tmp_path: Path) -> None:
    state = first_state()
    save(trainer, state, 0)
    about = {"store": str(tmp_path / "store"), "address": f"{REF}@0", "prefix": "model."}
    loader, model = vllm_stub.LOADERS["tsck"](SimpleNamespace(model_loader_extra_config=about)), Model()
    loader.download_model(None)
    loader.load_weights(model, None)
    assert equal(model.loaded, state)


@pytest.mark.usefixtures("registered")
def test_the_engine_takes_versions_and_repeats_what_failed(trainer: tsck.Store, tmp_path: Path) -> None:
    state, model = first_state(), Model()
    roots = [save(trainer, state, 0).root]
    cls = vllm_stub.WeightTransferEngineFactory._registry["tsck"]()
    engine = cls(None, SimpleNamespace(model_config=None), torch.device("cpu"), model)
    engine.shutdown()  # vLLM does, where nothing was followed
    with pytest.raises(RuntimeError, match="call init_weight_transfer_engine first"):
        engine.update_weights({"root": roots[0]})
    engine.init_transfer_engine(engine.init_info_cls(store=str(tmp_path / "store"), ref=REF, prefix="model."))
    vllm_stub.CALLS.clear()
    for step in range(2):
        engine.start_weight_update()
        engine.update_weights({"root": roots[step]})
        engine.finish_weight_update()
        assert equal(model.loaded, state)
        train(state, step)
        roots.append(save(trainer, state, step + 1).root)
    assert vllm_stub.CALLS == ["initialize", "finalize"] * 2
    for fails in (True, False):
        model.fails = fails
        engine.start_weight_update()
        if fails:
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.update_weights({"root": roots[2]})
        else:
            engine.update_weights({"root": roots[2]})
            engine.finish_weight_update()
    assert equal(model.loaded, state)
    engine.shutdown()


def run(call: Any) -> Any:
    """In a thread of its own: this one may have an event loop, of a browser that another test drives."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, call).result()


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_adapters_by_address_each_written_once(trainer: tsck.Store, tmp_path: Path) -> None:
    names = {f"base_model.model.q.lora_{side}.weight": f"q.lora_{side}.default.weight" for side in "AB"}
    files: dict[str, Any] = {"adapter_config.json": {"peft_type": "LORA", "r": 2}, "adapter_names.json": names}
    state = {"model": {name: torch.randn(2, 8) for name in names.values()}}
    trainer.put_snapshot({**state, "model_files": {name: json.dumps(file).encode() for name, file in files.items()}}, ref="lora", step=4)
    resolver = vllm_stub.LoRAResolverRegistry.resolvers["tensorstore_ck"]
    paths = set()
    for name in ("tsck:lora@4", "tsck:lora"):
        request = run(resolver.resolve_lora("llama", name))
        assert request.lora_name == name
        paths.add(request.lora_path)
    (path,) = paths
    assert {file.name for file in Path(path).iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    for name in ("llama-chat", "tsck:lora@5", "tsck:other"):
        assert run(resolver.resolve_lora("llama", name)) is None
