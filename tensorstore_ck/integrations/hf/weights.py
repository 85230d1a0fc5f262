"""The weights of a model: how it takes them from a snapshot, and which of them an adapter of peft leaves as they are.

Snapshots need not contain the base below adapters of peft: they refer to it by name and hash, and a resume checks it. The base is what peft
does not save for any adapter: the parameters that are not trained, without embeddings that were resized. Only plain tensors count:
parameters of quantized or sharded models stay in the snapshots.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import nn
from transformers import Trainer as NativeTrainer

from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import FrozenChangedError, MismatchError
from tensorstore_ck.integrations.model_file_names import ADAPTER_NAMES
from tensorstore_ck.session.restoring import Restoring
from tensorstore_ck.store import Store
from tensorstore_ck.training import TrainingState, model_state
from tensorstore_ck.training.parameter_names import MODEL, ParameterNames

NOTE: Final = "base_model"
"""The key of the reference in a snapshot's metadata."""
_logger: Final = logging.getLogger("tensorstore_ck.hf")


class AdapterBase:
    """The base of one model. From the first reference on, its parameters must not change."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self._parameters: dict[str, nn.Parameter] = {}
        self._versions: list[int] = []
        self._hash = ""

    def choose(self, files: Mapping[str, bytes]) -> Collection[str]:
        """The names of the parameters to which a run's snapshots refer; none if there is no base to refer to.

        `files`: the model's, with the names of what peft saves of the active adapter.
        """
        if ADAPTER_NAMES in files:
            self._refer_to(_below_adapters(self.model, parse_json(files[ADAPTER_NAMES]).values()))
        return self._parameters.keys() if ADAPTER_NAMES in files else ()

    def metadata(self) -> dict[str, object]:
        """The reference, for the metadata of a snapshot. Checks the parameters.

        Raises:
            FrozenChangedError: since the first reference, one is trained, or an operation of torch has changed it.
        """
        now = dict(_frozen(self.model))
        for (name, parameter), version in zip(self._parameters.items(), self._versions, strict=False):
            if now.get(name) is not parameter or parameter._version != version:
                raise FrozenChangedError(
                    f"{name} belongs to the base below the adapter, to which the snapshots of this run refer, and is trained or was "
                    "changed since: nothing was saved. Pass save_base=True to store the base, too",
                    object_id=name,
                )
        return {NOTE: {"name": _name_of(self.model), "hash": self._content_hash(), "bytes": self._size_bytes()}}

    def left_out(self, restoring: Restoring) -> Collection[str]:
        """The names that a snapshot leaves out, since it refers to this base; none: it contains its base.

        Raises:
            MismatchError: it refers to another one.
        """
        reference = restoring.metadata().get(NOTE)
        if not isinstance(reference, Mapping):
            return ()
        stored = set(restoring.lazy().names())
        self._refer_to((name, parameter) for name, parameter in _frozen(self.model) if f"{MODEL}{name}" not in stored)
        if reference.get("hash") != self._content_hash():
            root, here = restoring.info.root.hex()[:12], f"{_name_of(self.model) or 'without a name'} (hash {self._content_hash()[:12]})"
            there = f"{reference.get('name') or 'without a name'} (hash {str(reference.get('hash'))[:12]})"
            raise MismatchError(
                f"{root} holds an adapter of another base: its base model is {there}, and that of this run is {here}. Load the base as at "
                f"the first start, in the same dtype. To train on another base, export the adapter (`tsck export {root} --to hf DIR`) and "
                "take another ref",
                object_id=root,
            )
        return self._parameters.keys()

    def announce(self) -> None:
        """Says in one line what the snapshots will hold."""
        held_bytes = sum(tensor.nbytes for name, tensor in model_state.get_state(self.model).items() if name not in self._parameters)
        _logger.warning(
            "snapshots hold the adapter alone (%s) and refer to its base, %s (%s), by hash: save_base=True stores it, too",
            human_bytes(held_bytes),
            _name_of(self.model) or "a model without a name",
            human_bytes(self._size_bytes()),
        )

    def _size_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in {id(parameter): parameter for parameter in self._parameters.values()}.values())

    def _refer_to(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        now = dict(parameters)
        if now.keys() != self._parameters.keys():
            self._parameters, self._versions, self._hash = now, [], ""

    def _content_hash(self) -> str:
        versions = [parameter._version for parameter in self._parameters.values()]
        if not self._hash or versions != self._versions:
            self._hash, self._versions = _hash(self._parameters), versions
        return self._hash


def _frozen(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model_state.get_state(model, keep_vars=True).items():
        if type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor and not parameter.requires_grad:
            yield name, parameter


def _below_adapters(model: Any, of_active: Iterable[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that peft saves for no adapter, resized embeddings too. `of_active`: the names that it saves of the active one."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - it is there where a model has adapters

    state = model.state_dict()
    by_name = model_state.get_state(model)
    saved = [by_name[name] for name in of_active]
    for adapter in model.peft_config:
        saved += get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter, save_embedding_layers=False).values()
    kept = {parameter.untyped_storage().data_ptr() for parameter in saved}
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    below = {id(parameter) for parameter in inner.parameters()}
    for name, parameter in _frozen(model):
        if id(parameter) in below and parameter.untyped_storage().data_ptr() not in kept:
            yield name, parameter


def _name_of(model: Any) -> str:
    active = model.active_adapter if isinstance(model.active_adapter, str) else next(iter(model.peft_config))
    config = getattr(model, "config", None)
    return str(model.peft_config[active].base_model_name_or_path or getattr(config, "_name_or_path", "") or "")


def _hash(parameters: Mapping[str, nn.Parameter]) -> str:
    """Over names, dtypes, shapes and bytes, one tensor in the host's memory at a time."""
    whole = blake3()
    for name, parameter in sorted(parameters.items()):
        data = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        whole.update(repr((name, str(parameter.dtype), tuple(parameter.shape))).encode())
        whole.update(blake3(data, max_threads=blake3.AUTO).digest())
    return whole.hexdigest()


class FrozenBase:
    """The parameters below adapters: those that are not trained when a run saves first, and must stay as they are."""

    def __init__(self) -> None:
        self._declared: dict[str, tuple[torch.Tensor, int]] = {}

    def names(self, model: nn.Module) -> list[str]:
        """Their names in a snapshot.

        Raises:
            FrozenChangedError: one is trained now, or an operation has changed it. Saves in the background read these parameters while the
                training goes on, so a snapshot could have values of a later step.
        """
        parameters = ParameterNames({"": model}).parameters
        frozen = {f"{MODEL}{name}": parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        if not self._declared:
            self._declared = {name: (parameter, parameter._version) for name, parameter in frozen.items()}
        for name, (parameter, version) in self._declared.items():
            if frozen.get(name) is not parameter or parameter._version != version:
                raise FrozenChangedError(
                    f"{name} was frozen at an earlier save of this run, and is trained or was changed since: nothing was saved. "
                    "Leave out frozen_base=True",
                    object_id=name,
                )
        return list(self._declared)


def takes_by_name(trainer: NativeTrainer) -> bool:
    """Whether tensors can be filled in place: the model has no `load_state_dict` of its own, through which transformers restores it.

    Such a model may, for example, resize a buffer that grew.
    """
    native: Any = trainer
    return type(native.model).load_state_dict is nn.Module.load_state_dict or native.is_fsdp_enabled


def restore(trainer: NativeTrainer, store: Store, address: str, group: "dist.ProcessGroup | None", *, base: AdapterBase) -> None:
    """Restores the weights in place, or through the model's own `load_state_dict`; `base`: of the model, to which a snapshot may refer.

    Raises:
        MismatchError: the snapshot refers to another base.
    """
    native: Any = trainer
    if takes_by_name(trainer):
        left_out, found = store.restoring(address, base.left_out, group=group)
        TrainingState(model=native.model).leaving_out(left_out).restore(store, found.root, group=group, parts=("model",))
    else:
        stored = store.checkout(address, select=["model.*"], group=group)["model"]
        native.model.load_state_dict(model_state.state_dict_of(native.model, stored))
