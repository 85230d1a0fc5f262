"""When a trainer's run saves, to which ref it may, and what a folder means whose save was never published."""

import os
import shlex
import warnings
from collections.abc import Mapping
from concurrent.futures import Future

import torch.distributed as dist

from tensorstore_ck.errors import ConflictError, NotFoundError, StoreError
from tensorstore_ck.integrations.trainer.pointers import read_pointer
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.store import Store
from tensorstore_ck.store.internals import knows_ref
from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.checkpointing import Checkpointer, Trigger
from tensorstore_ck.training.checkpointing.triggers import TriggerContext
from tensorstore_ck.training.rank_group import ask_first_rank


class Always(Trigger):
    """For a `Checkpointer` that is called only when the trainer has decided to save."""

    @property
    def name(self) -> str:
        """Empty: the trainer's reason is not known."""
        return ""

    def fires(self, moment: TriggerContext) -> bool:
        """True."""
        return True


def new_checkpointer(
    store: Store,
    training: TrainingState,
    ref: str,
    *,
    argument: str,
    group: "dist.ProcessGroup | None",
    keep: Mapping[str, object] | None,
    asynchronous: bool,
) -> Checkpointer:
    """For a trainer that decides itself when to save. What the policy drops is freed while the run goes on. Raises as `require_own_ref`."""
    require_own_ref(store, ref, argument)
    return Checkpointer(
        store, training, ref=ref, when=Always(), keep=keep, free_dropped=keep is not None, asynchronous=asynchronous, group=group
    )


def published_or_newest(store: Store, given: str | bool | None, ref: str, group: "dist.ProcessGroup | None") -> str | bool | None:
    """Returns `given`, or True, which means the newest snapshot, for a folder that a kill left before its save was published.

    Only if the newest is of an earlier step: else the folder is of a part of the run that was trained again.
    """
    pointer = read_pointer(given) if isinstance(given, str) and os.path.isdir(given) else None
    if pointer is None or pointer.store != store.url or not pointer.address.startswith(f"{ref}@"):
        return given
    store.finish_staged(ref, group)

    def earlier_step() -> bytes:
        try:
            store.resolve(pointer.address)
        except NotFoundError:
            newest = store.resolve(ref).step if ref in store.branches() else None
            is_earlier = newest is not None and newest < int(pointer.address.rpartition("@")[2])
            return str(newest).encode() if is_earlier else b""
        return b""

    step = ask_first_rank(store, group, f"the snapshot of {given}", earlier_step).decode()
    if step:
        warnings.warn(f"{given} names a save that was never published: resuming from {ref}@{step}, the newest that was", stacklevel=3)
    return True if step else given


def require_own_ref(store: Store, ref: str, argument: str) -> None:
    """A run that starts from the beginning must not take over the ref of another, which may still be running.

    Raises:
        ConflictError: the ref has snapshots that this `Store` neither saved nor restored; `argument` continues them.
    """
    if knows_ref(store, ref) or ref not in store.branches():
        return
    newest = store.resolve(ref)
    raise ConflictError(
        f"{ref!r} has snapshots of an earlier run (step {newest.step}): pass {argument} to continue it, or another ref to keep both, or "
        f"delete it first with `tsck forget {shlex.quote(ref)} -s {shlex.quote(store.url)}`",
        object_id=ref,
    )


def future_of(pending: PendingSnapshot) -> Future[Snapshot]:
    """The published snapshot of a save."""
    future: Future[Snapshot] = Future()
    future.set_running_or_notify_cancel()

    def end(ended: PendingSnapshot) -> None:
        if ended.snapshot is not None:
            future.set_result(ended.snapshot)
        else:
            future.set_exception(ended.error or StoreError("the save ended without a snapshot"))

    pending.published.on_settled(end)
    return future
