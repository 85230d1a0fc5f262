"""The stubs of vLLM and SGLang, and the classes of the examples, have the signatures of the engines' sources."""

import importlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import engine_signatures, test_sglang_follower, test_vllm_follower, vllm_stub

KEPT = json.loads(engine_signatures.KEPT.read_text())
REAL = {name: known for files in KEPT.values() for file, names in files.items() if file != "version" for name, known in names.items()}
PARALLEL_STATE = {"vllm": "distributed/parallel_state.py", "sglang": "srt/distributed/parallel_state.py"}
ELSEWHERE = {"LoRAResolverRegistry": "_LoRAResolverRegistry", "finalize_layerwise_reload": "finalize_layerwise_processing"}
"""Of the stub's names: the class of this object; what this function calls with all that it got."""


def arguments(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def methods(cls: type) -> dict[str, list[str]]:
    return {
        name: arguments(getattr(cls, name))
        for name, value in vars(cls).items()
        if inspect.isfunction(value) or isinstance(value, classmethod)
    }


@pytest.mark.parametrize(
    "member", [member for members in vllm_stub.MODULES.values() for member in members], ids=lambda member: member.__name__
)
def test_the_stub_of_vllm_is_as_its_sources(member: Any) -> None:
    known = REAL[ELSEWHERE.get(member.__name__, member.__name__)]
    if inspect.isfunction(member):
        assert arguments(member) == known
        return
    assert getattr(member, "__abstractmethods__", frozenset()) == set(known["abstract"])
    assert [*vars(member).get("__annotations__", ())] == known["fields"][: len(vars(member).get("__annotations__", ()))]
    for name, given in methods(member).items():
        if name in known["methods"] and name != "__eq__":  # dataclasses make that one
            assert given == known["methods"][name][: len(given)], name


def test_the_stubs_of_runners_are_as_their_sources() -> None:
    for engine in ("vllm", "sglang"):
        coordinator = KEPT[engine][f"{engine}/{PARALLEL_STATE[engine]}"]["GroupCoordinator"]
        assert {"world_size", "cpu_group", "device_group"} <= set(coordinator["fields"])
        assert coordinator["methods"]["is_last_rank"] == []
    assert arguments(test_sglang_follower.get_tp_group) == REAL["get_tp_group"]
    runner, updater = test_vllm_follower.ModelRunner, test_sglang_follower.WeightUpdater
    assert arguments(runner.reload_weights) == REAL["GPUModelRunner.reload_weights"]
    assert arguments(updater.update_weights_from_tensor) == REAL["WeightUpdater.update_weights_from_tensor"]
    assert REAL["Engine.update_weights_from_tensor"][:2] == ["named_tensors", "load_format"]
    assert REAL["Engine.update_weights_from_disk"][0] == "model_path"
    assert REAL["Engine.begin_weight_update"] == ["selector"]
    assert REAL["Engine.end_weight_update"] == []


def test_the_plugin_overrides_what_vllm_has() -> None:
    with vllm_stub.installed():
        plugin = importlib.import_module("examples.vllm_plugin")
    for cls in (plugin.SnapshotLoader, plugin.StoreEngine, plugin.AdapterResolver):
        known = REAL[cls.__base__.__name__]
        assert set(known["abstract"]) <= set(methods(cls))
        for name, given in methods(cls).items():
            if name in known["methods"] and name != "__init__":
                assert given == known["methods"][name], name
    fields = REAL["WeightTransferEngine"]["fields"]
    assert {"init_info_cls", "update_info_cls", "supports_draft_weight_update"} <= set(fields)
    assert plugin.StoreEngine.supports_draft_weight_update is False


@pytest.mark.skipif("ENGINE_SOURCES" not in os.environ, reason="ENGINE_SOURCES names no folder with the engines' wheels")
def test_the_signatures_are_those_of_the_sources() -> None:
    assert engine_signatures.read_all(Path(os.environ["ENGINE_SOURCES"])) == KEPT
