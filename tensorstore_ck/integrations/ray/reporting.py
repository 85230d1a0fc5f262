"""`report` and `restore`, in the workers of Ray Train.

Natively each worker uploads its own files. Here all workers save one snapshot, and Ray gets a folder with the snapshot's name. What Ray
keeps is pinned, and a policy of the ref drops the rest, so that the store drops a snapshot when Ray has dropped its folder.

Ray alone decides which checkpoints it keeps: by nested scores, missing ones, and those that validations add later. Its list is followed,
one report later. A pin's owner is the folder of the experiment, its reason the name of the checkpoint.
"""

import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Final

import ray.train
import torch.distributed as dist
from ray.train import Checkpoint

from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InputError, InvalidOptionError, NotFoundError, StoreError
from tensorstore_ck.integrations.ray.compatibility import num_to_keep, reported_checkpoints
from tensorstore_ck.integrations.trainer.pointers import (
    POINTER,
    SnapshotPointer,
    address_through_ref,
    is_there,
    read_pointer,
    write_pointer,
)
from tensorstore_ck.integrations.trainer.saves import Always
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.store import Store
from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.checkpointing import Checkpointer
from tensorstore_ck.training.rank_group import ask_first_rank
from tensorstore_ck.training.resume_search import DAMAGES

UNPINNED: Final = 2
"""How many snapshots the policy of the ref keeps: the newest one is pinned when Ray has its folder."""
OPTIONS: Final = ("checkpoint_dir_name", "validation")
DROPPED: Final = 4
"""The store frees dropped snapshots when there are at least this many."""


@short_errors
def report(metrics: Mapping[str, Any], state: object, *, store: Store, ref: str, step: int, **options: Any) -> Snapshot:
    """Replaces `ray.train.report`, on all workers: saves a snapshot of `state`, and reports a checkpoint that names it.

    With `CheckpointConfig.num_to_keep`, the snapshots of all checkpoints that Ray has are pinned, and unpinned at a report after Ray has
    deleted them; a ref without a policy gets one that drops snapshots without a pin. gc frees them while the run continues.

    Args:
        metrics: As for `ray.train.report`; the first worker's numbers are stored with the snapshot.
        state: A `TrainingState`; or any state that `Store.put_snapshot` takes.
        store: The open store. Its path must be absolute: Ray starts workers in folders of their own.
        ref: The branch.
        step: The number of completed steps.
        options: For `ray.train.report`: ``checkpoint_dir_name=``, ``validation=``.

    Returns:
        The snapshot. A failure that may pass is tried again.

    Raises:
        InvalidOptionError: an argument is invalid, or this is no worker of Ray Train.
        ConflictError: the ref has snapshots of another run, and this one began without `restore`.
        StoreError: the save failed; nothing was reported.
    """
    if unknown := sorted(options.keys() - OPTIONS):
        raise InvalidOptionError(
            f"tsck.ray.report takes {' and '.join(OPTIONS)} of the options of ray.train.report, not {', '.join(unknown)}: Ray uploads only "
            "a small folder, after the snapshot is durable",
            object_id=unknown[0],
        )
    group = _require_worker(store)
    is_first = group is None or group.rank() == 0
    is_limited = num_to_keep() is not None
    if is_first and is_limited:
        follow_ray(store, ref)
        if ref not in store.policies():
            store.set_policy(ref, keep_last=UNPINNED)
    given: dict[str, Any] = {"ref": ref, "step": step, "metrics": _numbers(metrics, store, group), "group": group}
    snapshot = store.retrying(lambda: state.put(store, **given) if isinstance(state, TrainingState) else store.put_snapshot(state, **given))
    if not is_first:
        options.pop("validation", None)  # of the checkpoint, which the first worker reports
        ray.train.report(dict(metrics), checkpoint=None, **options)
        return snapshot
    if is_limited and sum(removal.ref == ref for removal in store.forgotten()) >= DROPPED:
        try:
            store.free_dropped(ref)
        except StoreError as exc:
            warnings.warn(
                f"the snapshots that the policy of {ref!r} dropped still take space: {exc}; a later save tries again", stacklevel=2
            )
    before = ray.train.get_checkpoint()
    with tempfile.TemporaryDirectory(prefix="tsck-") as folder:
        write_pointer(Path(folder), SnapshotPointer(store.url, snapshot.root))
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(folder), **options)
    after = ray.train.get_checkpoint()
    if is_limited and after is not None and (before is None or after.path != before.path):  # else Ray skipped it: another worker died
        pin_reported(store, after, snapshot.root)
    return snapshot


@short_errors
def restore(state: object, *, store: Store, ref: str) -> Snapshot | None:
    """Restores `state` on all workers, on any number of them: from `ray.train.get_checkpoint()`; if Ray has none, from the ref's newest
    snapshot that is intact.

    Ray has none when a new experiment continues an earlier one. If the snapshot that Ray names is damaged or gone, a warning says so, and
    the newest intact one is restored.

    Args:
        state: As for `report`; tensors are filled in place.
        store: The open store.
        ref: The branch.

    Returns:
        The snapshot, whose `step` is where to continue; None: there is none yet.

    Raises:
        InputError: the checkpoint that Ray has was not reported by `report`.
        NotFoundError: Ray has a checkpoint, and the ref no snapshots.
        MismatchError: it does not fit.
        DamageError: none of the existing snapshots can be restored.
    """
    group, skipped = _require_worker(store), ""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            pointer = read_pointer(folder)
        if pointer is None:
            raise InputError(
                f"the checkpoint {checkpoint.path} has no {POINTER}: another program reported it. Load it as before, and begin another ref",
                object_id=str(checkpoint.path),
            )
        try:
            return _restore_named(pointer.address, state=state, store=store, ref=ref, group=group)
        except (*DAMAGES, NotFoundError) as exc:
            skipped = f"the snapshot {pointer.address[:16]} that Ray's checkpoint names was skipped: {exc}"
    newest = Checkpointer(store, state, ref=ref, when=Always(), asynchronous=False, group=group).resume()
    if newest is None and checkpoint is not None:
        raise NotFoundError(
            f"{ref!r} in {store.url} has no snapshots, and Ray has a checkpoint, {checkpoint.path}, that names one: open the store that "
            "it was reported from",
            object_id=ref,
        )
    if newest is not None and skipped:
        warnings.warn(f"{skipped}; resuming from {newest.ref}@{newest.step} instead", stacklevel=2)
    return newest


def _restore_named(root: str, state: object, store: Store, ref: str, group: "dist.ProcessGroup | None") -> Snapshot:
    def name() -> bytes:
        if ref not in store.branches():
            return root.encode()
        snapshot = store.resolve(root)
        address = address_through_ref(store, snapshot, ref)  # so that the next save may follow it
        if address == snapshot.root:
            raise NotFoundError(f"{ref} has another snapshot of step {snapshot.step} by now", object_id=root)
        return address.encode()

    address = ask_first_rank(store, group, f"the address of {root}", name).decode()

    def read() -> object:
        if isinstance(state, TrainingState):
            return state.restore(store, address, group=group)
        return store.checkout(address, into=state, group=group)

    store.retrying(read)
    return store.resolve(root)


def _require_worker(store: Store) -> "dist.ProcessGroup | None":
    """The group of all workers."""
    if not isinstance(store, Store):
        raise InvalidOptionError(f"store= must be an open store, such as tsck.open('/data/ckpt'), not {store!r}", object_id="store")
    num_to_keep()
    workers = ray.train.get_context().get_world_size()
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if workers != ranks:
        raise InvalidOptionError(
            f"Ray Train has {workers} workers, and torch.distributed {ranks} ranks: a TorchTrainer connects them", object_id="ray"
        )
    return dist.group.WORLD if ranks > 1 else None


def _numbers(metrics: Mapping[str, Any], store: Store, group: "dist.ProcessGroup | None") -> dict[str, float]:
    """The metrics of the first worker, as in Ray."""

    def numbers() -> bytes:
        return json.dumps({name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}).encode()

    return dict(parse_json(ask_first_rank(store, group, "the metrics of the first worker", numbers)))


def pin_reported(store: Store, checkpoint: Checkpoint, address: str) -> None:
    """Pins the snapshot at `address` for as long as Ray has the checkpoint. A failure is a warning: `follow_ray` tries again."""
    path = PurePath(checkpoint.path)
    try:
        store.pin(address, owner=_owner(path), reason=path.name)
    except StoreError as exc:
        warnings.warn(f"the snapshot {address[:16]} of {path} is not pinned: {exc}; the next report tries again", stacklevel=3)


def follow_ray(store: Store, ref: str) -> None:
    """Unpins the snapshots of `ref` whose checkpoints Ray has deleted; pins those of checkpoints that have no pin.

    Ray takes reports in their order, up to two later than a worker makes them. So a pin that is older than one of a checkpoint in Ray's
    list, and not in the list, is one that Ray has deleted, or never took since the worker died; a younger one may be on its way.
    """
    reported = reported_checkpoints()
    listed = {PurePath(report.checkpoint.path).name: report.checkpoint for report in reported}
    if not listed:
        return
    owner = _owner(PurePath(reported[0].checkpoint.path))
    try:
        pinned = {pin.reason: pin for pin in store.pins() if pin.owner == owner}
        newest = max((pin.time_ns for name, pin in pinned.items() if name in listed), default=0)
        for name, pin in pinned.items():
            if name not in listed and pin.time_ns < newest and pin.snapshot.ref == ref:
                store.unpin(pin.snapshot.root, owner=owner)
    except StoreError as exc:
        warnings.warn(f"snapshots that Ray deleted may stay pinned: {exc}; the next report tries again", stacklevel=3)
        return
    for name in listed.keys() - pinned.keys():
        with listed[name].as_directory() as folder:
            pointer = read_pointer(folder)
        if pointer is not None and is_there(store, pointer.address):
            pin_reported(store, listed[name], pointer.address)


def _owner(checkpoint: PurePath) -> str:
    return f"ray {checkpoint.parent}"
