"""Parameter names, whatever wraps the model or its layers: they fit any number of ranks."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tensorstore_ck.errors import UnsupportedValueError

MODEL: Final = "model."
"""Prefix of the paths of model tensors in a state."""
_WRAPPED: Final = ("_orig_mod", "_checkpoint_wrapped_module")
"""Attributes in which torch.compile and activation checkpointing keep the module."""


class ParameterNames:
    """Parameter <-> name, over all models of a job."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self._names: dict[int, str] = {}
        for key, model in models.items():
            _reshard(model)
            for prefix, module in walk(model, f"{key}." if key else ""):
                for name, parameter in module.named_parameters(recurse=False):
                    if id(parameter) not in self._names:  # tied parameters get the first name, as in torch
                        self._names[id(parameter)] = prefix + name
                        self.parameters[prefix + name] = parameter

    def of(self, parameter: torch.Tensor) -> str | None:
        """The name of a parameter; None if no model has it."""
        return self._names.get(id(parameter))

    def below(self, prefix: str, stored: Iterable[str]) -> list[str]:
        """The parameters with stored entries under `prefix`; also other names there, up to the first dot.

        Skips stored parameters that this process lacks: they belong to another stage, or the model does not fit.
        """
        stored = list(stored)
        elsewhere = {path.removeprefix(MODEL) for path in stored if path.startswith(MODEL)}
        names: dict[str, None] = {}
        for path in stored:
            if not path.startswith(prefix):
                continue
            whole = name = path.removeprefix(prefix)
            while name and name not in self.parameters and name not in elsewhere:
                name = name.rpartition(".")[0]
            if not name or name in self.parameters:
                names[name or whole.partition(".")[0]] = None
        return list(names)


def require_supported(models: Mapping[str, nn.Module]) -> None:
    """Rejects models without a state by parameter name, or without memory.

    Raises:
        UnsupportedValueError: a model uses FSDP1, whose parameters are flattened, or has meta tensors.
    """
    for key, model in models.items():
        path = f"model.{key}" if key else "model"
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise UnsupportedValueError(
                f"{path} is wrapped by FullyShardedDataParallel (FSDP1): use fully_shard (FSDP2), or pass the result of "
                "torch.distributed.checkpoint.state_dict.get_state_dict to store.put_snapshot",
                object_id=path,
            )
        if any(parameter.is_meta for parameter in model.parameters()):
            raise UnsupportedValueError(
                f"{path} has parameters on the meta device: give them memory first (model.to_empty(device=...))", object_id=path
            )


def _reshard(model: nn.Module) -> None:
    """Gives FSDP2 modules their shards back. After an evaluation they hold whole parameters, and the optimizer has the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def wrapping(module: nn.Module | None) -> str | None:
    """The attribute in which a wrapper keeps its module; None: this is no wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    return None if module is None else next((attribute for attribute in _WRAPPED if attribute in module._modules), None)


def without_wrappers(path: str) -> str:
    """A stored path; that of a model without attributes of wrappers. Earlier builds stored some nested wrappers' attributes."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPED) if path.startswith(MODEL) else path


def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """A module and its submodules, each with the prefix of its parameters' names; wrappers add no prefix."""
    yield prefix, module
    attribute = wrapping(module)
    for name, child in module._modules.items():  # includes modules that occur twice
        if child is not None:
            yield from walk(child, prefix if name == attribute else f"{prefix}{name}.")
