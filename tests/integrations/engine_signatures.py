"""The signatures of vLLM and SGLang that our examples meet, read from their sources without importing them, which would need CUDA.

    pip download --no-deps vllm sglang; unzip each into DIR/vllm and DIR/sglang
    python -m tests.integrations.engine_signatures DIR

writes them to engine_signatures.json; ENGINE_SOURCES=DIR lets the test compare the file with these sources.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_suffix(".json")
VLLM = {
    "distributed/parallel_state.py": ["GroupCoordinator", "get_world_group", "get_dp_group", "get_tp_group"],
    "distributed/weight_transfer/base.py": ["WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo"],
    "distributed/weight_transfer/factory.py": ["WeightTransferEngineFactory"],
    "lora/request.py": ["LoRARequest"],
    "lora/resolver.py": ["LoRAResolver", "_LoRAResolverRegistry"],
    "model_executor/model_loader/__init__.py": ["register_model_loader"],
    "model_executor/model_loader/base_loader.py": ["BaseModelLoader"],
    "model_executor/model_loader/reload/layerwise.py": ["initialize_layerwise_reload", "finalize_layerwise_processing"],
    "v1/worker/gpu_model_runner.py": ["GPUModelRunner.reload_weights"],
}
SGLANG = {
    "srt/distributed/parallel_state.py": ["GroupCoordinator", "get_tp_group"],
    "srt/model_executor/model_runner_components/weight_updater.py": ["WeightUpdater.update_weights_from_tensor"],
    "srt/entrypoints/engine.py": [
        "Engine.begin_weight_update",
        "Engine.update_weights_from_tensor",
        "Engine.end_weight_update",
        "Engine.update_weights_from_disk",
    ],
}
Signatures = dict[str, Any]


def read_all(folder: Path) -> Signatures:
    """The signatures in the unpacked wheels of a folder, by engine, module and name."""
    return {
        engine: {
            "version": next((folder / engine).glob(f"{engine}-*.dist-info")).name.split("-")[1].removesuffix(".dist"),
            **{f"{engine}/{file}": _read(folder / engine / engine / file, wanted) for file, wanted in files.items()},
        }
        for engine, files in (("vllm", VLLM), ("sglang", SGLANG))
    }


def _read(file: Path, wanted: list[str]) -> Signatures:
    found: Signatures = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            for name in wanted:
                owner, _, method = name.partition(".")
                if owner == node.name:
                    found[name] = _class(node) if not method else _class(node)["methods"][method]
        elif isinstance(node, ast.FunctionDef) and node.name in wanted:
            found[node.name] = _arguments(node)
    return {name: found[name] for name in wanted}


def _class(node: ast.ClassDef) -> Signatures:
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        "fields": [item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)],
        "abstract": [item.name for item in functions if any("abstractmethod" in ast.dump(by) for by in item.decorator_list)],
        "methods": {item.name: _arguments(item) for item in functions},
    }


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [f"*{each.arg}" for each in (given.vararg, given.kwarg) if each is not None]
    return [name for name in names if name not in ("self", "cls")]


if __name__ == "__main__":
    KEPT.write_text(json.dumps(read_all(Path(sys.argv[1])), indent=1) + "\n")
