"""From which snapshot a trainer's run resumes, and whether it may save to a ref."""

import os
import shlex
import warnings
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from tensorstore_ck.errors import ConflictError, CorruptObjectError, NotFoundError, SnapshotMarkedBadError
from tensorstore_ck.integrations.light_folders import read_pointer
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS
from tensorstore_ck.store import Store
from tensorstore_ck.training.checkpointing import Trigger
from tensorstore_ck.training.checkpointing.resume_candidates import choose
from tensorstore_ck.training.checkpointing.triggers import TriggerContext

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Always(Trigger):
    """For a `Checkpointer` that is called only when the trainer has decided to save."""

    @property
    def name(self) -> str:
        """Empty: the trainer's reason is not known."""
        return ""

    def fires(self, moment: TriggerContext) -> bool:
        """True."""
        return True


def newest_address(store: Store, ref: str, skipped: Collection[str], group: "ProcessGroup | None", argument: str) -> str | None:
    """The address of the newest snapshot to resume from, on all ranks the same; None if there are none.

    Args:
        store: The store.
        ref: The branch.
        skipped: Addresses that were found damaged.
        group: The ranks.
        argument: The trainer's argument that takes an address, for messages.

    Raises:
        SnapshotMarkedBadError: replicas had drifted apart, so that the user must choose.
        CorruptObjectError: none of the existing snapshots can be restored.
    """
    store.finish_staged(ref, group)

    def choose_here() -> bytes:
        chosen = choose(store, ref, skipped, None)
        if chosen.drift:
            raise SnapshotMarkedBadError(
                f"{chosen.drift}. A rank may be corrupted: compare the copies, then pass an earlier step, or {argument}={chosen.address!r} "
                "to accept it",
                object_id=chosen.address,
            )
        if not chosen.address and not chosen.is_new:
            raise CorruptObjectError(f"none of the snapshots of {ref!r} can be restored: run `tsck fsck --read-data`", object_id=ref)
        return chosen.address.encode()

    return ask_first_rank(store, group, f"the resume of {ref!r}, {len(skipped)} skipped", choose_here).decode() or None


def published_or_newest(store: Store, given: str | bool | None, ref: str, group: "ProcessGroup | None") -> str | bool | None:
    """What a trainer was given to resume from; True, the newest snapshot, for a folder that a kill left before its save was published.

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


def ask_first_rank(store: Store, group: "ProcessGroup | None", title: str, answer: Callable[[], bytes]) -> bytes:
    """What the first rank answers, on all ranks; its error, if it has one.

    Args:
        store: The store.
        group: The ranks, which all call this; None: there is one.
        title: What is asked, for messages.
        answer: Called on the first rank.
    """
    if group is None:
        return answer()
    return store.session.groups.broadcast(group, title, answer, timeout_seconds=TIMEOUT_SECONDS)


def require_own_ref(store: Store, ref: str, argument: str) -> None:
    """A run that starts from the beginning must not take over the ref of another, which may still be running.

    Raises:
        ConflictError: the ref has snapshots that this `Store` neither saved nor restored; `argument` continues them.
    """
    if store.session.fence.knows(ref) or ref not in store.branches():
        return
    newest = store.resolve(ref)
    raise ConflictError(
        f"{ref!r} has snapshots of an earlier run (step {newest.step}): pass {argument} to continue it, or another ref to keep both, or "
        f"delete it first with `tsck forget {shlex.quote(ref)} -s {shlex.quote(store.url)}`",
        object_id=ref,
    )
