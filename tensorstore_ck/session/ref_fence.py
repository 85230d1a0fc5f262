"""What one store handle has seen of refs: the fencing that keeps a job given up for dead from overwriting its successor's work."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.branch_conflict import branch_command
from tensorstore_ck.engine.write.publish import AnyHead, Expected
from tensorstore_ck.engine.write.request import PutRequest
from tensorstore_ck.engine.write.sampled_checks import SAMPLE_SHARE, Sampling, turn_of
from tensorstore_ck.engine.write.suspicious_save import SaveChecks, require_checks
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.codec import CodecName, DeltaOption, check_codec_name, check_delta
from tensorstore_ck.format.record import MAX_STEP, SaveOrigin, check_metrics, check_origin, encode_metadata
from tensorstore_ck.log import BranchHead, RefTable, validate_ref_name
from tensorstore_ck.log.address import Resolved, resolve
from tensorstore_ck.log.snapshot import Snapshot


class LastSeen:
    """The type of `LAST_SEEN`."""

    def __repr__(self) -> str:
        return "tsck.LAST_SEEN"


LAST_SEEN: Final = LastSeen()
"""The default. As ``expect=``: move the ref from where this handle last saved or restored it. As ``parent=``: that snapshot."""


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
    """What this handle saved and restored. Thread-safe.

    If it was interrupted before it could note a move, or the answer was lost, the log says what this handle wrote: see `settle`.
    """

    def __init__(self) -> None:
        self._refs: dict[str, _Ref] = {}
        self._forgotten: dict[str, _Ref] = {}
        """Branches that this handle forgot: `undo` may bring them back."""
        self._attempts: dict[str, Ulid] = {}
        """The last save of this rank's group to a ref: rank 0 wrote the entry."""
        self._restored: Digest | None = None
        self._lock = threading.Lock()

    def note(self, ref: str, head: Digest | None, current: Digest) -> None:
        """This handle moved the ref to `head`, or continues from there; the state in memory is `current`."""
        with self._lock:
            self._refs[ref] = _Ref(head, current, is_moved=True)

    def note_attempt(self, ref: str, snapshot: Ulid) -> None:
        """Rank 0 of this process's group may publish this snapshot."""
        self._attempts[ref] = snapshot

    def settle(self, engine: Engine, view: RefTable, ref: str) -> bool:
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
        attempt = view.snapshot(self._attempts[ref]) if ref in self._attempts else None
        if (attempt is None or attempt.root != branch.root) and not self._wrote(engine, branch, is_known=seen is not None):
            return False
        with self._lock:
            is_ahead = seen is not None and seen.is_staged
            self._refs[ref] = _Ref(branch.root, seen.current if seen is not None and is_ahead else branch.root, True, is_staged=is_ahead)
        return True

    @staticmethod
    def _wrote(engine: Engine, branch: BranchHead, *, is_known: bool) -> bool:
        """Whether this handle appended the entry that moved a branch; of a branch that it has not seen, only with a save of its own: else
        it only finished what an earlier process had staged.
        """
        if not engine.log.wrote(branch.n):
            return False
        if is_known:
            return True
        entry = engine.log.chain.read(branch.n)
        ops = () if entry is None else entry.ops
        return any(op.name == "put" and op.fields["snapshot"] == branch.ulid and op.fields.get("staged") is None for op in ops)

    def note_staged(self, ref: str, root: Digest) -> None:
        """The state in memory is `root`, which will be on the ref once it is published."""
        with self._lock:
            seen = self._refs.get(ref)
            self._refs[ref] = _Ref(seen.head if seen is not None else None, root, is_moved=True, is_staged=True)

    def note_published(self, ref: str, root: Digest) -> None:
        """An earlier staged snapshot is on the ref now; the state in memory may be a later one."""
        with self._lock:
            seen = self._refs.get(ref)
            if seen is not None:  # else this process only finished the save of another one
                self._refs[ref] = seen._replace(head=root, is_staged=seen.is_staged and seen.current != root)

    def adopt(self, view: RefTable, ref: str) -> None:
        """Continues from the head of the ref, if this handle has not seen it."""
        branch = view.branch(ref)
        if branch is not None and ref not in self._refs:
            self.note(ref, branch.root, branch.root)

    def knows(self, ref: str) -> bool:
        """Whether this handle has saved or restored there."""
        return ref in self._refs

    def current(self, ref: str) -> Digest | None:
        """The snapshot that the state in memory is, if this handle has saved or restored there."""
        seen = self._refs.get(ref)
        return seen.current if seen is not None else None

    def note_moved(self, ref: str, snapshot: Snapshot) -> Snapshot:
        """`snapshot`, to which this handle moved the ref."""
        root = Digest(bytes.fromhex(snapshot.root))
        self.note(ref, root, root)
        return snapshot

    def drop(self, refs: Iterable[str]) -> None:
        """This handle forgot the refs: its next save to one starts it again, unless `undo` brings it back."""
        with self._lock:
            for ref in refs:
                seen = self._refs.pop(ref, None)
                if seen is not None:
                    self._forgotten[ref] = seen

    def note_restored(self, found: Resolved) -> None:
        """The state in memory is what was found at an address."""
        info, ref = found.info, found.branch
        self._restored = info.root
        if ref is None:
            return
        with self._lock:
            is_moved = ref in self._refs and self._refs[ref].is_moved
            is_fenced = not is_moved and info.root == found.branch_root and info.ref == ref  # else nobody has saved to the branch yet
            self._refs[ref] = _Ref(found.branch_root, info.root, is_moved, info.step if is_fenced else None)

    def check_step(self, engine: Engine, view: RefTable, asked: "PutOptions") -> None:
        """Refuses to take a ref over by mistake: a script that restored the newest snapshot of a job, and then starts its own.

        Raises:
            InvalidOptionError: the step is lower than that of the head, which this handle restored, and it has not saved there yet.
        """
        seen, branch = self._refs.get(asked.ref), view.branch(asked.ref)
        if asked.any_step or seen is None or seen.least_step is None or asked.step is None or asked.step >= seen.least_step:
            return
        if branch is None or branch.root != seen.head or not isinstance(asked.expect, LastSeen):
            return  # `check_expected` reports that
        root = branch.root.hex()[:16]
        raise InvalidOptionError(
            f"step {asked.step} is lower than step {seen.least_step}, where this store handle restored ref {asked.ref!r}, and it has put "
            "nothing there: if the job that did is still running, its next save would be refused. Put to another ref, which its first save "
            f"makes, or which `{branch_command(engine, view, branch)}` makes. To begin again on {asked.ref!r} itself: restore an earlier "
            f"step first, or put with expect={root!r}",
            object_id="step",
        )

    def expected(self, view: RefTable, ref: str, expect: object) -> Expected:
        """The root at which a save must find `ref`."""
        if isinstance(expect, LastSeen):
            seen, branch = self._refs.get(ref), view.branch(ref)
            if seen is not None and branch is not None and branch.root == seen.current:
                return branch.root  # what was restored while it was staged is published by now
            return seen.head if seen else None
        if expect is None or isinstance(expect, AnyHead):
            return expect
        if isinstance(expect, Snapshot):
            return Digest(bytes.fromhex(expect.root))
        return resolve(view, str(expect)).info.root

    def request(self, engine: Engine, ref: str, **options: Any) -> PutRequest:
        """A save to `ref` as of now, checked as far as possible before its state is known; `options`: see `check_put_options`.

        Raises:
            InvalidOptionError, InvalidNameError: an argument is invalid.
        """
        return self.at_head(engine, check_put_options(engine, ref, **options))

    def at_head(self, engine: Engine, asked: "PutOptions", *, sync: bool = True) -> PutRequest:
        """A save as of now; with `sync` by the newest entry of the log, else by what this host knows."""
        if sync:
            engine.log.sync()
        view = engine.log.view()
        self.settle(engine, view, asked.ref)
        self.check_step(engine, view, asked)
        parent, expected = self.parent(view, asked.ref, asked.parent), self.expected(view, asked.ref, asked.expect)
        coding = engine.codecs.coding(asked.ref, asked.codec, asked.delta)
        nearest = self.current(asked.ref) or parent or self._head(view, asked.ref) or self._restored
        began_ns = engine.clock()
        what = (asked.metadata, asked.metrics, coding, nearest, asked.checks, began_ns, asked.origin)
        return PutRequest(asked.ref, asked.step, parent, expected, *what)

    def parent(self, view: RefTable, ref: str, said: object = LAST_SEEN) -> Digest | None:
        """The snapshot that a new one continues: what this handle last saved or restored on the ref, or the ref's head.

        Raises:
            NotFoundError: `said` names a snapshot that does not exist.
        """
        if isinstance(said, LastSeen):
            return self.current(ref) or self._head(view, ref)
        return None if said is None else resolve(view, said.root if isinstance(said, Snapshot) else str(said)).info.root

    @staticmethod
    def _head(view: RefTable, ref: str) -> Digest | None:
        branch = view.branch(ref)
        return branch.root if branch is not None else None


class PutOptions(NamedTuple):
    """The arguments of a save besides the state, checked as far as possible without reading the log."""

    ref: str
    step: int | None
    expect: object
    metadata: bytes
    metrics: dict[str, float]
    codec: CodecName | None
    delta: DeltaOption
    parent: object
    checks: SaveChecks
    origin: SaveOrigin
    any_step: bool = False
    """Whether the step may be lower than that of a head that was only restored: see `RefFence.check_step`."""

    def sampling_of_copies(self, number: int) -> "tuple[Sampling, PutOptions]":
        """Which samples of save `number` to compare with its copies; and its options, with nothing to be read a second time."""
        sampling = Sampling(turn_of(None, number), self.checks.verify_capture)
        return sampling, self._replace(checks=self.checks._replace(verify_capture=0.0))


def check_put_options(
    engine: Engine,
    ref: str,
    *,
    step: object = None,
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, object] | None = None,
    expect: object = LAST_SEEN,
    parent: object = LAST_SEEN,
    codec: object = None,
    delta: object = None,
    unchanged: object = "warn",
    verify_capture: object = SAMPLE_SHARE,
    triggers: object = (),
    epoch: object = None,
    made_ns: int | None = None,
    any_step: bool = False,
) -> PutOptions:
    """Checks the arguments of a save.

    Raises:
        InvalidOptionError, InvalidNameError: an argument is not what it must be.
    """
    checks, origin = require_checks(unchanged, verify_capture), check_origin(triggers, epoch, made_ns)
    validate_ref_name(ref)
    packed_metadata, checked_metrics = encode_metadata(metadata), check_metrics(metrics)
    if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__")):
        raise InvalidOptionError(f"step must be an integer, not {step!r}", object_id="step")
    number = None if step is None else step.__index__()
    if number is not None and not 0 <= number <= MAX_STEP:
        raise InvalidOptionError(f"step {number} must be from 0 to {MAX_STEP}", object_id="step")
    if not (expect is None or isinstance(expect, LastSeen | AnyHead | Snapshot | str)):
        raise InvalidOptionError(f"expect must be a root, tsck.ANY or None, not {type(expect).__name__}", object_id="expect")
    if not (parent is None or isinstance(parent, LastSeen | Snapshot | str)):
        raise InvalidOptionError(f"parent must be an address, a Snapshot or None, not {type(parent).__name__}", object_id="parent")
    engine.require_writable()
    chosen = None if codec is None else check_codec_name(codec)
    how = (chosen, check_delta(delta), parent, checks, origin, any_step)
    return PutOptions(ref, number, expect, packed_metadata, checked_metrics, *how)
