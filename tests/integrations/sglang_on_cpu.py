"""SGLang's own `WeightUpdater` with `examples.sglang_follower`, on CPUs. Not a test: it needs an environment of its own.

    an environment V with this project's test requirements, and pip install --no-deps of: orjson pybase64 compressed-tensors msgspec
    interegular partial_json_parser pyzmq openai_harmony xgrammar outlines setproctitle python-multipart uvloop fastapi starlette IPython
    einops soundfile torchao modelscope dill gguf loguru
    the wheel of sglang 0.5.23, unpacked into S
    PYTHONPATH=S:. V/bin/python -m tests.integrations.sglang_on_cpu

The updater gets what a worker gets: named tensors as SGLang serializes them. The model is ours, and loads by SGLang's
`default_weight_loader`; the engine around it needs CUDA. Packages for GPUs are replaced by mocks.
Last run: SGLang 0.5.23, torch 2.13.0+cpu, 2026-11-28.
"""

import importlib.abc
import importlib.machinery
import sys
import tempfile
import types
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import MagicMock, patch

import torch

import tensorstore_ck as tsck
from tests.feed.versions import REF, copy_of, first_state, save, train

GPU_PACKAGES = {"sentencepiece", "torchvision", "triton", "tvm_ffi"}
LOADER = "examples.sglang_follower.load"


class Mocked(types.ModuleType):
    """A package that is not used."""

    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {"__init__": lambda *_, **__: None}) if name[0].isupper() else MagicMock())
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `GPU_PACKAGES`, where they are not installed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in GPU_PACKAGES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = Mocked(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Model(torch.nn.Module):
    """Loads weights as SGLang's models do, by its own `default_weight_loader`."""

    def __init__(self, names: dict[str, torch.Tensor], load_one: Any) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict({name.replace(".", "_"): torch.zeros_like(tensor) for name, tensor in names.items()})
        self.load_one = load_one

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load_one(self.weights[name.replace(".", "_")], tensor)


def main() -> None:
    """Three versions through the updater."""
    import transformers.modeling_utils  # noqa: F401 - it looks for the real packages

    sys.meta_path.append(Finder())
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.model_loader.weight_utils import default_weight_loader
    from sglang.srt.utils import MultiprocessingSerializer

    from examples import sglang_follower

    state = first_state()
    model = Model(state["model"], default_weight_loader)
    updater = weight_updater.WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders=[LOADER],
        get_model=lambda: model,
        update_model_fields=lambda **_: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )
    one_rank = patch.object(weight_updater, "get_parallel", lambda: types.SimpleNamespace(tp_rank=0))
    no_cache = patch.object(weight_updater, "get_model", lambda: types.SimpleNamespace(weight_cache_mode="off"))
    one_worker = patch.object(sglang_follower, "get_tp_group", lambda: types.SimpleNamespace(world_size=1))
    with tempfile.TemporaryDirectory() as folder, tsck.open(folder, create=True) as trainer, one_rank, no_cache, one_worker:
        versions = []
        for step in range(3):
            version = sglang_follower.named(folder, REF, save(trainer, state, step).root, prefix="model.")
            versions.append((copy_of(state), MultiprocessingSerializer.serialize(version)))  # in a worker it refuses tensors of CPUs
            train(state, step + 1)
        for saved, sent in versions:
            done, message = updater.update_weights_from_tensor(MultiprocessingSerializer.deserialize(sent), LOADER)
            if not done:
                raise SystemExit(message)
            for name, tensor in saved["model"].items():
                torch.testing.assert_close(model.weights[name.replace(".", "_")].data, tensor, rtol=0, atol=0)
            print(message)
        sglang_follower.held_weights(folder, REF, "model.", None).store.close()


if __name__ == "__main__":
    main()
