"""`CheckpointManager`: the methods of torch_checkpointing's, whose checkpoints are snapshots on one ref of a store.

A checkpoint's id is in the metadata of its snapshot. If it ends with a number that is not below the step of the newest snapshot, the
number is the snapshot's step, too.
"""

import os
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, MismatchError, NotFoundError, StoreError
from tensorstore_ck.integrations.torch_checkpointing import rank_items
from tensorstore_ck.integrations.torch_checkpointing.rank_items import ItemSpecs, UnfitItemsError, require_id
from tensorstore_ck.integrations.trainer.attach import all_ranks, opened
from tensorstore_ck.integrations.trainer.pointers import newest_noted, note_at
from tensorstore_ck.integrations.trainer.saves import future_of
from tensorstore_ck.log.field_checks import validate_ref_name
from tensorstore_ck.log.retention import Policy
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS
from tensorstore_ck.session.restoring import Restoring
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.state import LoadReport, LoadWarning
from tensorstore_ck.store import Store
from tensorstore_ck.training.checkpointing.dropped_snapshots import DroppedSnapshots
from tensorstore_ck.training.rank_group import ask_first_rank
from tensorstore_ck.training.resume_search import ResumeSearch

NOTE: Final = "torch_checkpointing"
"""Key in a snapshot's metadata."""
_NUMBER: Final = re.compile(r"([0-9]{1,18})$")


class NoSuchCheckpointError(NotFoundError, FileNotFoundError):
    """There is no checkpoint of that id, or it lacks an item; torch_checkpointing raises the built-in error."""

    __str__ = Exception.__str__


class MissingKeysError(MismatchError, RuntimeError):
    """A checkpoint lacks keys of ``into=``, or does not fit it; torch_checkpointing raises the built-in error."""


class ClosedManagerError(InvalidOptionError, RuntimeError):
    """The manager is closed; torch_checkpointing raises the built-in error."""


@short_errors
class CheckpointManager:
    """Replaces `torch_checkpointing.CheckpointManager`::

        manager = tsck.CheckpointManager(store="./ckpt", ref="runs/gpt")
        manager.load("step_1000", into={"model": model.state_dict(), "step": 0})
        manager.save("step_2000", {"model": model.state_dict(), "step": 2000})

    With torch.distributed, all ranks create it, save and load together. Not thread-safe.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        store: Store | str | os.PathLike[str],
        ref: str,
        keep: Mapping[str, object] | None = None,
        changed_by: Optimizer | Sequence[Optimizer] = (),
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """All ranks create one with the same arguments.

        Args:
            config: A `CheckpointManager.Config` of torch_checkpointing. Used are the items' ``required`` and ``resharder``, ``default``,
                and whether saves are asynchronous; whatever concerns its files and its process is ignored. An item with a resharder must be
                equal on all ranks, except for tensors that are spread over them. None: any items, asynchronous.
            store: The store; or its URL or path, where it is created if there is none, and closed by `close`.
            ref: The branch for all checkpoints.
            keep: The retention policy of the ref, as in `Store.set_policy`; what it drops is freed while the job runs.
            changed_by: The optimizers of the items: see `Store.put_snapshot_async`.
            timeout_seconds: How long to wait for the other ranks.

        Raises:
            InvalidOptionError: an argument is invalid.
            InvalidNameError: `ref` is no valid name.
        """
        self._specs = ItemSpecs.of(config)
        policy = None if keep is None else Policy.of_rules(keep)
        validate_ref_name(ref)
        self._owns_store = not isinstance(store, Store)
        self._store = opened(store)
        self._ref, self._timeout_seconds, self._changed_by = ref, timeout_seconds, changed_by
        self._pending: PendingSnapshot | None = None
        self._closed = False
        is_first = self._group is None or self._group.rank() == 0
        if policy is not None and is_first and self._store.policies().get(ref) != policy:
            self._store.set_policy(ref, **policy.encode())
        self._dropped = DroppedSnapshots(self._store, ref) if policy is not None and is_first else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else None

    @property
    def _group(self) -> "dist.ProcessGroup | None":
        """Also of one rank, which may have DTensors."""
        return all_ranks(also_one=True)

    # --- save ---------------------------------------------------------------------------------------------------------

    def save(self, checkpoint_id: str, checkpoint: Mapping[str, Any]) -> "Future[Snapshot] | None":
        """Saves a payload, after the previous save has ended. All ranks call it, each with its own side.

        The payload may be changed when it returns. If several saves have one id, `load` finds the newest.

        Args:
            checkpoint_id: Any text, such as ``"step_1000"`` or a path.
            checkpoint: Items by key.

        Returns:
            The Future of the published snapshot; None if saves are synchronous.

        Raises:
            UnfitItemsError: an item is missing or not allowed; a `KeyError`.
            ClosedManagerError: after `close`; a `RuntimeError`.
            ConflictError: the ref has checkpoints of another run, and this one began without `load`.
            StoreError: this save failed, or the previous one.
        """
        self._require_open("save")
        self._finish_pending()
        checkpoint_id = require_id(checkpoint_id)
        group = self._group
        state, own, step = self._sides(checkpoint_id, checkpoint, group)
        options: dict[str, Any] = {
            "ref": self._ref,
            "step": step,
            "metadata": {NOTE: {"id": checkpoint_id, "ranks": 1 if group is None else group.size()}},
            "group": group,
            "rank_state": own,
            "timeout_seconds": self._timeout_seconds,
        }
        if self._specs.asynchronous:
            self._pending = self._store.put_snapshot_async(state, changed_by=self._changed_by, **options)
        else:
            self._store.put_snapshot(state, **options)
        if self._dropped is not None:
            self._dropped.note_save()
        return None if self._pending is None else future_of(self._pending)

    def _sides(self, checkpoint_id: str, checkpoint: Mapping[str, Any], group: "dist.ProcessGroup | None") -> tuple[Any, Any, int | None]:
        """The items that all ranks have in common, and this rank's own, with the step. A failure here is raised on all ranks."""

        def step() -> int | None:
            number, head = _NUMBER.search(checkpoint_id), self._store.branches().get(self._ref)
            wanted = None if number is None else int(number[1])
            return None if wanted is None or (head is not None and wanted < (head.step or 0)) else wanted

        def prepare() -> tuple[rank_items.Leaves, Any]:
            self._specs.require_fitting(checkpoint)
            plain = (pair for pair in rank_items.leaves({**checkpoint}) if pair[0] and not self._specs.is_shared(pair[0][0]))
            return {path: leaf for path, leaf in plain if not rank_items.is_spread(leaf)}, step()

        if group is None or group.size() == 1:
            self._specs.require_fitting(checkpoint)
            return {**checkpoint}, None, step()
        paths, common_step = rank_items.find_own(self._store, group, prepare, self._timeout_seconds)
        payload: Any = {**checkpoint}
        own = [[list(path), leaf] for path, leaf in rank_items.leaves(payload) if path in paths]
        return rank_items.without(payload, paths), {"own": own}, common_step

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait(self._timeout_seconds)

    # --- load ---------------------------------------------------------------------------------------------------------

    def load(
        self,
        checkpoint_id: str | os.PathLike[str],
        into: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
        metadata_format: object = None,
    ) -> Mapping[str, Any]:
        """Loads a checkpoint, on any number of ranks. All ranks call it, each with its own side.

        Args:
            checkpoint_id: The id of a save of this ref; or the address of any snapshot in the store, such as ``"runs/x@1000"``.
            into: What to load: tensors are filled in place, other values replaced; None stands for all of an item. By default the items
                of the `Config`.
            map_location: The device of new tensors.
            strict: Whether keys of `into` that the checkpoint lacks are an error; else a warning names them.
            metadata_format: Not supported.

        Returns:
            The loaded items.

        Raises:
            NoSuchCheckpointError: no such checkpoint, or it lacks an item; a `FileNotFoundError`.
            MissingKeysError: `strict`, and the checkpoint lacks keys; or a tensor has another shape or dtype; a `RuntimeError`.
            DamageError: it is damaged.
            ClosedManagerError: after `close`.
        """
        if metadata_format is not None:
            raise InvalidOptionError("metadata_format= is for files: `tsck import` makes snapshots of them", object_id="metadata_format")
        into = self._begin_load(into, map_location)
        checkpoint_id, title = require_id(checkpoint_id), f"the load of checkpoint {checkpoint_id!r}"
        find = partial(self._address_of, checkpoint_id)
        address = ask_first_rank(self._store, self._group, title, lambda: find().encode(), timeout_seconds=self._timeout_seconds).decode()
        return self._restore(address, checkpoint_id, into, map_location, strict=strict)

    def load_newest(
        self, into: Mapping[str, Any] | None = None, *, map_location: Any = None, strict: bool = False
    ) -> tuple[str, Mapping[str, Any]] | None:
        """Loads the newest checkpoint that is neither marked nor damaged, as `load` does; a warning names each one that is skipped.

        torch_checkpointing has no such method: its users look for folders. The arguments are those of `load`.

        Returns:
            The checkpoint's id, on all ranks the same, and the loaded items; None: there is none yet.

        Raises:
            SnapshotMarkedBadError: replicas had drifted apart, so that the user must choose.
            DamageError: none of the existing checkpoints can be loaded.
            StoreError: see `load`.
        """
        items = self._begin_load(into, map_location)

        def load(address: str) -> tuple[str, Mapping[str, Any]]:
            checkpoint_id = self._id_at(address)
            return checkpoint_id, self._restore(address, checkpoint_id, items, map_location, strict=strict)

        return self._search().restore(load)

    def newest_id(self) -> str | None:
        """The id of the newest checkpoint that is not marked as damaged or bad, on all ranks the same; None: there is none yet.

        Reads nothing of it: use `load_newest` to skip a checkpoint whose damage is not known yet.
        """
        self._require_open("look")
        address = self._search().next_address(announce=False)
        return None if address is None else self._id_at(address)

    def _search(self) -> ResumeSearch:
        advice = "pass {} or the id of an earlier checkpoint to load()"
        return ResumeSearch(self._store, self._ref, self._group, advice=advice, timeout_seconds=self._timeout_seconds)

    def _id_at(self, address: str) -> str:
        root = self._store.resolve(address).root
        return str(note_at(self._store, root, NOTE).get("id", root))

    def _begin_load(self, into: Mapping[str, Any] | None, map_location: object) -> Mapping[str, Any]:
        """The target of a load, once the previous save has ended."""
        self._require_open("load")
        self._finish_pending()
        if not (map_location is None or isinstance(map_location, str | torch.device)):
            raise InvalidOptionError(f"map_location= must be a device, not {map_location!r}", object_id="map_location")
        items = dict.fromkeys(self._specs.items) if into is None else into
        if into is None and not items:
            raise UnfitItemsError("load requires into=, or items in the Config, to know which items to read", object_id="into")
        return items

    def _restore(self, address: str, checkpoint_id: str, into: Mapping[str, Any], map_location: Any, *, strict: bool) -> Mapping[str, Any]:
        read = partial(self._read, checkpoint_id, into, strict, "cpu" if map_location is None else map_location)
        loaded: Mapping[str, Any] = self._store.restoring(address, read, group=self._group, timeout_seconds=self._timeout_seconds)[0]
        return loaded

    def _address_of(self, checkpoint_id: str) -> str:
        """The address of the newest checkpoint with this id; through the ref, if possible, so that the next save may follow it."""
        number = _NUMBER.search(checkpoint_id)
        steps = (None,) if number is None else (int(number[1]), None)
        address = newest_noted(self._store, self._ref, NOTE, ("id", checkpoint_id), steps)
        if address is not None:
            return address
        try:
            return self._store.resolve(checkpoint_id).root
        except StoreError as exc:
            raise NoSuchCheckpointError(
                f"{self._ref!r} in {self._store.url} has no checkpoint {checkpoint_id!r}, and it is no address: "
                f"`tsck log {shlex.quote(self._ref)} -s {shlex.quote(self._store.url)}` lists the snapshots",
                object_id=checkpoint_id,
            ) from exc

    def _read(self, checkpoint_id: str, into: Mapping[str, Any], strict: bool, device: Any, restoring: Restoring) -> dict[str, Any]:
        """Loads into `into`, which can fail on one rank alone."""
        self._specs.require_fitting(into)
        own = self._own(checkpoint_id, into, restoring)
        target, report, stored = {**into}, LoadReport(), restoring.lazy()
        shared = {name.partition(".")[0] for name in (*stored.names(), *stored.state_values)}
        left = rank_items.without(target, own)
        restored = restoring.checkout(into=left, strict=False, report=report, device=device) if left else {}
        absent = {name.partition(".")[0] for name in report.missing} - shared - {path[0] for path in own}
        for key in target:
            if key in absent:
                raise NoSuchCheckpointError(f"checkpoint {checkpoint_id!r} has no item {key!r}", object_id=key)
        if report.mismatched:
            raise MissingKeysError(f"checkpoint {checkpoint_id!r} does not fit into=: {report.mismatched}", object_id=checkpoint_id)
        if report.missing and strict:
            raise MissingKeysError(f"checkpoint {checkpoint_id!r} is missing keys: {report.missing}", object_id=checkpoint_id)
        if report.missing:
            warnings.warn(f"checkpoint {checkpoint_id!r} lacks keys, which stay as they are: {report.missing}", LoadWarning, stacklevel=2)
        return dict(rank_items.put_back(target, restored, own))

    def _own(self, checkpoint_id: str, into: Mapping[str, Any], restoring: Restoring) -> rank_items.Leaves:
        """This rank's own leaves, of those that are wanted."""
        ranks = note_at(self._store, restoring.info.root.hex(), NOTE).get("ranks", 1)
        if ranks == 1:
            return {}
        rank = 0 if restoring.group is None else restoring.group.rank()
        stored = restoring.rank_state(rank if rank < ranks else 0)["own"]
        own = {tuple(path): leaf for path, leaf in stored if rank_items.is_wanted({**into}, tuple(path))}
        if rank >= ranks and own:
            names = [".".join(map(str, path)) for path in own]
            raise NoSuchCheckpointError(
                f"checkpoint {checkpoint_id!r} was saved by {ranks} ranks, each with {names} of its own: rank {rank} has none. Load "
                "it on as many ranks, or leave these out of into=",
                object_id=names[0],
            )
        return own

    # --- the rest -----------------------------------------------------------------------------------------------------

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Checks a payload; a process that saves alone also allocates memory for background saves: see `Store.prepare`.

        Raises:
            UnfitItemsError: an item is missing or not allowed.
        """
        self._require_open("prewarm staging")
        self._specs.require_fitting(checkpoint)
        group = self._group
        if self._specs.asynchronous and (group is None or group.size() == 1):
            with suppress(StoreError):  # what cannot be saved is an error of the save
                self._store.prepare({**checkpoint}, group=group, changed_by=self._changed_by)

    def lock(self) -> AbstractContextManager[None]:
        """For ``with manager.lock(): optimizer.step()``: does nothing, since `save` has captured the payload when it returns."""
        return nullcontext()

    def close(self) -> None:
        """Waits for the save in progress; idempotent.

        Raises:
            StoreError: it failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._finish_pending()
            if self._dropped is not None:
                self._dropped.finish()
        finally:
            if self._owns_store:
                self._store.close()

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise ClosedManagerError(f"cannot {what} with a closed CheckpointManager: create another one", object_id="CheckpointManager")
