"""What one store handle has seen, saved and staged of each ref.

A save expects its ref there, so that a job that was given up for dead cannot overwrite its successor's work.
"""

import logging
import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.branch_conflict import branch_command
from tensorstore_ck.engine.write.request import AnyHead, Expected, LastSeen, SaveOptions, SaveRequest
from tensorstore_ck.engine.write.sampled_checks import Sampling, turn_of
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log import BranchHead, RefTable
from tensorstore_ck.log.address import Resolved, resolve
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.staging.staged_chain import StagedChain

_logger: Final = logging.getLogger("tensorstore_ck.session")


class _Ref(NamedTuple):
    """Where a ref was, and which of its snapshots the training state comes from."""

    head: Digest | None
    current: Digest
    is_moved: bool
    """Whether this handle has moved the ref, and not only restored it."""
    least_step: int | None = None
    """The step of the head, if this handle only restored it: a save without `expect` may not have a lower one."""
    is_staged: bool = False
    """Whether `current` is staged and will be on the ref later."""


class RefFence:
    """What this handle saved, restored and staged. Nothing else owns that state: the caller and the threads of its saves share one lock.

    If it was interrupted before it could note a move, or the answer was lost, the log says what this handle wrote: see `catch_up`.
    """

    def __init__(self) -> None:
        self._refs: dict[str, _Ref] = {}
        self._forgotten: dict[str, _Ref] = {}
        """Branches that this handle forgot: `undo` may bring them back."""
        self._attempts: dict[str, Ulid] = {}
        """The last save of this rank's group to a ref: rank 0 wrote the entry."""
        self._restored: Digest | None = None
        self._chains: dict[str, StagedChain] = {}
        self._lock = threading.Lock()

    def chain(self, ref: str) -> StagedChain:
        """What this handle has staged on the ref, under the lock of this object."""
        with self._lock:
            if ref not in self._chains:
                self._chains[ref] = StagedChain(lambda: self.current(ref), self._lock)
            return self._chains[ref]

    def chains(self) -> list[StagedChain]:
        """What this handle has staged, by ref."""
        with self._lock:
            return [*self._chains.values()]

    def note(self, ref: str, head: Digest | None, current: Digest) -> None:
        """Notes that this handle moved the ref to `head`, or continues from there. The state in memory is `current`."""
        with self._lock:
            self._refs[ref] = _Ref(head, current, is_moved=True)

    def note_attempt(self, ref: str, snapshot: Ulid) -> None:
        """Notes that rank 0 of this process's group may publish this snapshot."""
        with self._lock:
            self._attempts[ref] = snapshot

    def catch_up(self, engine: Engine, view: RefTable, ref: str) -> bool:
        """Notes where the ref is, if this handle moved it there without noting that; returns whether it did.

        Raises:
            StoreError: the log cannot be read.
        """
        branch = view.branch(ref)
        with self._lock:
            seen = self._refs.get(ref)
            if branch is None or (seen is not None and branch.root in (seen.head, seen.current)):
                return False
            if seen is None and ref in self._forgotten and self._forgotten[ref].head == branch.root:
                self._refs[ref] = self._forgotten.pop(ref)
                return True
            tried = self._attempts.get(ref)
        attempt = view.snapshot(tried) if tried is not None else None
        if (attempt is None or attempt.root != branch.root) and not self._wrote(engine, branch, is_known=seen is not None):
            return False
        with self._lock:
            is_ahead = seen is not None and seen.is_staged
            self._refs[ref] = _Ref(branch.root, seen.current if seen is not None and is_ahead else branch.root, True, is_staged=is_ahead)
        return True

    @staticmethod
    def _wrote(engine: Engine, branch: BranchHead, *, is_known: bool) -> bool:
        """Whether this handle moved a branch by a save of its own, not by publishing what an earlier process had staged.

        `is_known`: this handle has seen the branch; then any entry of its own counts.
        """
        if not engine.log.wrote(branch.n):
            return False
        if is_known:
            return True
        entry = engine.log.chain.read(branch.n)
        ops = () if entry is None else entry.ops
        return any(op.name == "put" and op.fields["snapshot"] == branch.ulid and op.fields.get("staged") is None for op in ops)

    def note_staged(self, ref: str, root: Digest) -> None:
        """Notes that the state in memory is `root`, which will be on the ref once it is published."""
        with self._lock:
            seen = self._refs.get(ref)
            self._refs[ref] = _Ref(seen.head if seen is not None else None, root, is_moved=True, is_staged=True)

    def note_published(self, ref: str, root: Digest) -> None:
        """Notes that an earlier staged snapshot is on the ref now. The state in memory may be a later one."""
        with self._lock:
            seen = self._refs.get(ref)
            if seen is not None:  # else this process only finished the save of another one
                self._refs[ref] = seen._replace(head=root, is_staged=seen.is_staged and seen.current != root)

    def adopt(self, view: RefTable, ref: str) -> None:
        """Continues from the head of the ref, if this handle has not seen it."""
        branch = view.branch(ref)
        if branch is not None and ref not in self._refs:
            self.note(ref, branch.root, branch.root)

    def current(self, ref: str) -> Digest | None:
        """The snapshot that the state in memory is, if this handle has saved or restored there."""
        seen = self._refs.get(ref)
        return seen.current if seen is not None else None

    def note_moved(self, ref: str, snapshot: Snapshot) -> Snapshot:
        """Notes that this handle moved the ref to `snapshot`; returns it."""
        root = Digest(bytes.fromhex(snapshot.root))
        self.note(ref, root, root)
        return snapshot

    def drop(self, refs: Iterable[str]) -> None:
        """Notes that this handle forgot the refs. Its next save to one starts it again, unless `undo` brings it back."""
        with self._lock:
            for ref in self._refs.keys() & refs:
                self._forgotten[ref] = self._refs.pop(ref)

    def note_restored(self, resolved: Resolved) -> None:
        """Notes that the state in memory is the snapshot of an address."""
        info, ref = resolved.info, resolved.branch
        with self._lock:
            self._restored = info.root
            if ref is None:
                return
            is_moved = ref in self._refs and self._refs[ref].is_moved
            is_fenced = not is_moved and info.root == resolved.branch_root and info.ref == ref  # else nobody has saved to the branch yet
            self._refs[ref] = _Ref(resolved.branch_root, info.root, is_moved, info.step if is_fenced else None)

    def expected(self, engine: Engine, view: RefTable, asked: "SaveOptions") -> Expected:
        """The root at which a save with these options (`asked`) must find its ref.

        Refuses to take over a ref by mistake: a script may restore the newest snapshot of a job, and then start its own training.

        Raises:
            InvalidOptionError: the step is lower than that of the head, which this handle restored, and it has not saved there yet.
            NotFoundError: `asked.expect` names a snapshot that does not exist.
        """
        expect, seen, branch = asked.expect, self._refs.get(asked.ref), view.branch(asked.ref)
        if expect is None or isinstance(expect, AnyHead):
            return expect
        if isinstance(expect, Snapshot):
            return Digest(bytes.fromhex(expect.root))
        if not isinstance(expect, LastSeen):
            return resolve(view, str(expect)).info.root
        if seen is None:
            return None
        is_lower = not asked.any_step and seen.least_step is not None and asked.step is not None and asked.step < seen.least_step
        if is_lower and branch is not None and branch.root == seen.head:
            root = branch.root.hex()[:16]
            raise InvalidOptionError(
                f"step {asked.step} is lower than step {seen.least_step}, where this store handle restored ref {asked.ref!r}, and it has "
                "saved nothing there. If the job that saves there is still running, its next save would be refused. Save to another ref, "
                f"which its first save makes, or which `{branch_command(engine, view, branch)}` makes. To begin again on {asked.ref!r} "
                f"itself, restore an earlier step first, or save with expect={root!r}",
                object_id="step",
            )
        if branch is not None and branch.root == seen.current:
            return branch.root  # the snapshot was restored while it was staged, and is published by now
        return seen.head

    def request_at(self, engine: Engine, view: RefTable, asked: "SaveOptions", *, is_offline: bool = False) -> SaveRequest:
        """The request for the save with these options (`asked`), as of `view`. With `is_offline` nothing is read from the store.

        Raises:
            InvalidOptionError, NotFoundError: see `expected`; or `asked.parent` names a snapshot that does not exist.
        """
        if not is_offline:
            self.catch_up(engine, view, asked.ref)
        expected, current, given = self.expected(engine, view, asked), self.current(asked.ref), asked.parent
        branch = view.branch(asked.ref) if current is None else None
        last = current if branch is None else branch.root
        if given is None or isinstance(given, LastSeen):
            parent = None if given is None else last
        else:
            parent = resolve(view, given.root if isinstance(given, Snapshot) else str(given)).info.root
        nearest = current or parent or last or self._restored
        coding = engine.codecs.coding(asked.ref, asked.codec, asked.delta)
        began_ns = engine.clock()
        if _logger.isEnabledFor(logging.DEBUG):
            roots = [root.hex() if isinstance(root, bytes) else str(root) for root in (parent, expected, nearest)]
            _logger.debug(
                "save %s@%s: continues %s, moves the ref from %s, compares with %s; codec %s", asked.ref, asked.step, *roots, coding.mode
            )
        return SaveRequest(
            asked.ref,
            asked.step,
            parent,
            expected,
            metadata=asked.metadata,
            metrics=asked.metrics,
            coding=coding,
            nearest=nearest,
            unchanged=asked.checks.unchanged,
            sampling=Sampling(turn_of(parent, asked.step), asked.checks.verify_capture),
            began_ns=began_ns,
            origin=asked.origin,
        )
