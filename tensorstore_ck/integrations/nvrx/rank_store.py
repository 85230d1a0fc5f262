"""`RankStore`: the local checkpoints that one rank keeps on a disk of its host, its own and replicas of others, in a store of their own.

Each checkpoint is a branch, ``iteration-N/rank-R``, with one snapshot. The store is opened for each call, since NVRx saves in a forked or
spawned process and deletes in a thread. Its cache and its notes are in the same folder, so that they are lost together with it.
"""

import importlib
import logging
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    CheckpointingException,
    CkptID,
    SameMachineReplicationException,
)

from tensorstore_ck.errors import ConflictError, DamageError, MissingExtraError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.integrations.trainer.attach import register_attributes
from tensorstore_ck.store import Store
from tensorstore_ck.store import open as open_store

_NAME: Final = re.compile(r"iteration-([0-9]+)/rank-([0-9]+)")
_FREE_AT_ONCE: Final = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1.0)
"""A save that runs meanwhile, in another process, writes again what this frees of it: see gc/PROTOCOL.md."""
_logger: Final = logging.getLogger(__name__)


class LocalCheckpointDamagedError(DamageError, CheckpointingException):  # type: ignore[misc]
    """Blocks of a local checkpoint are damaged or missing. It was deleted."""


class RankStore:
    """The local checkpoints of one rank and session."""

    def __init__(self, folder: Path, session_id: Any) -> None:
        self.folder = folder
        self._session_id = session_id
        self._made_by = os.getpid()

    def ids(self) -> list[CkptID]:
        """The ids of the checkpoints that are complete and durable."""
        with self._open() as store:
            return self._ids(store)

    def save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        """Returns when the checkpoint is durable. One with the same id, which a run that has ended had left, is replaced.

        Raises:
            SameMachineReplicationException: another process saves the same id.
            StoreError: see `Store.put_snapshot`; nothing is visible.
        """
        register_state_dict_types()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # NVRx's copies to the host may still be under way
        if os.getpid() != self._made_by:
            torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads, and would wait for them
        iteration, rank, _ = ckpt_id
        name = _name(iteration, rank)
        with self._open() as store:
            earlier = store.branches().get(name)
            try:
                store.put_snapshot({"checkpoint": state_dict}, ref=name, step=iteration, expect=earlier, parent=None, unchanged="ok")
            except ConflictError as exc:
                raise SameMachineReplicationException(ckpt_id) from exc

    def load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        """A checkpoint, on the CPU, every block verified.

        Raises:
            LocalCheckpointDamagedError: it is damaged; it was deleted, so that no later save shares its blocks.
            NotFoundError: there is none with this id.
            UnsupportedValueError: it has a type that is not registered in this process.
        """
        register_state_dict_types()
        iteration, rank, _ = ckpt_id
        name = _name(iteration, rank)
        with self._open() as store:
            try:
                state_dict: TensorAwareStateDict = store.checkout(name)["checkpoint"]
            except DamageError as exc:
                _delete(store, [name])
                raise LocalCheckpointDamagedError(
                    f"the local checkpoint of rank {rank} from iteration {iteration} in {store.url} was damaged ({exc.object_id}), "
                    "and is deleted",
                    object_id=name,
                ) from exc
        return state_dict

    def delete(self, *, iteration: int | None = None, before: int | None = None) -> None:
        """Deletes the checkpoints of `iteration`, or all of earlier iterations than `before`, and frees their space at once."""
        with self._open() as store:
            ckpt_ids = [ckpt_id for ckpt_id in self._ids(store) if ckpt_id[0] == iteration or (before is not None and ckpt_id[0] < before)]
            _delete(store, [_name(number, rank) for number, rank, _ in ckpt_ids])

    def _ids(self, store: Store) -> list[CkptID]:
        matches = (_NAME.fullmatch(name) for name in store.branches())
        return [(int(match[1]), int(match[2]), self._session_id) for match in matches if match is not None]

    def _open(self) -> Store:
        return open_store(self.folder / "store", create=True, cache_dir=self.folder / "cache", state_dir=self.folder / "state")


def _name(iteration: int, rank: int) -> str:
    return f"iteration-{iteration}/rank-{rank}"


def _delete(store: Store, names: Iterable[str]) -> None:
    for name in names:
        _logger.info("Deleting the local checkpoint %s in %s", name, store.url)
        store.forget(name)
    store.gc(_FREE_AT_ONCE)


_MEGATRON: Final = "megatron.core.dist_checkpointing."
_MEGATRON_TYPES: Final = (
    ("MCoreTensorAwareStateDict", f"{_MEGATRON}tensor_aware_state_dict"),
    ("ShardedObject", f"{_MEGATRON}mapping"),
    ("ShardedTensor", f"{_MEGATRON}mapping"),
)


def register_state_dict_types() -> None:
    """Lets the states of this process hold them; if Megatron-core is imported, its own, with what they hold. May be called again."""
    register_attributes(BasicTensorAwareStateDict, "nvrx.BasicTensorAwareStateDict")
    if "megatron.core" not in sys.modules:
        return
    try:
        from tensorstore_ck.integrations.megatron.safe_types import register_safe_types  # noqa: PLC0415 - it needs Megatron-core
    except MissingExtraError:  # another version of it: a save says that its state dict cannot be stored
        return
    register_safe_types()
    for name, module in _MEGATRON_TYPES:  # Megatron imports its state dict when it first saves one: a resumed job has not done so
        register_attributes(getattr(importlib.import_module(module), name), f"megatron.{name}")
