"""What one store handle has seen of refs: the fencing that keeps a job given up for dead from overwriting its successor's work."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from tensorstore_ck.address import resolve
from tensorstore_ck.codec import CodecName, DeltaOption, require_delta, require_name
from tensorstore_ck.engine import Engine
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.ids import Digest
from tensorstore_ck.log import RefTable, validate_ref_name
from tensorstore_ck.record import MAX_STEP, check_metrics, encode_metadata
from tensorstore_ck.sampling import SAMPLE_SHARE, Sampling, turn_of
from tensorstore_ck.snapshot import Snapshot
from tensorstore_ck.suspicion import Checks, require_checks
from tensorstore_ck.writer import Anything, Expected, PutRequest


class LastSeen:
    """The type of `LAST_SEEN`."""

    def __repr__(self) -> str:
        return "tsck.LAST_SEEN"


LAST_SEEN: Final = LastSeen()
"""As ``expect=``, the default: move the ref from where this handle last put or restored it."""


class _Ref(NamedTuple):
    """Where a ref was, and which of its snapshots the training state comes from."""

    head: Digest | None
    current: Digest


class Seen:
    """What this handle put and restored."""

    def __init__(self) -> None:
        self._refs: dict[str, _Ref] = {}
        self._restored: Digest | None = None

    def note(self, ref: str, head: Digest | None, current: Digest) -> None:
        """The ref is at `head`, and the state in memory is `current`."""
        self._refs[ref] = _Ref(head, current)

    def note_staged(self, ref: str, root: Digest) -> None:
        """The state in memory is `root`, which will be on the ref once it is published."""
        seen = self._refs.get(ref)
        self._refs[ref] = _Ref(seen.head if seen is not None else None, root)

    def note_published(self, ref: str, root: Digest) -> None:
        """What was staged before is on the ref now; the state in memory may be what was staged after it."""
        self._refs[ref] = self._refs[ref]._replace(head=root)

    def adopt(self, view: RefTable, ref: str) -> None:
        """Goes on from wherever the ref is, if this handle has not seen it."""
        branch = view.branch(ref)
        if branch is not None and ref not in self._refs:
            self.note(ref, branch.root, branch.root)

    def knows(self, ref: str) -> bool:
        """Whether this handle has put or restored there."""
        return ref in self._refs

    def current(self, ref: str) -> Digest | None:
        """What the state in memory is, if this handle has put or restored there."""
        return self._refs[ref].current if ref in self._refs else None

    def drop(self, ref: str) -> None:
        """This handle forgot the ref: its next put there begins it anew."""
        self._refs.pop(ref, None)

    def note_restored(self, root: Digest) -> None:
        """The state in memory is `root`."""
        self._restored = root

    def expected(self, view: RefTable, ref: str, expect: object) -> Expected:
        """Where a put to `ref` must find it."""
        if isinstance(expect, LastSeen):
            seen, branch = self._refs.get(ref), view.branch(ref)
            if seen is not None and branch is not None and branch.root == seen.current:
                return branch.root  # what was restored while it was staged is published by now
            return seen.head if seen else None
        if expect is None or isinstance(expect, Anything):
            return expect
        if isinstance(expect, Snapshot):
            return Digest(bytes.fromhex(expect.root))
        return resolve(view, str(expect)).info.root

    def request(
        self,
        engine: Engine,
        ref: str,
        *,
        step: object = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, object] | None = None,
        expect: object = LAST_SEEN,
        codec: object = None,
        delta: object = None,
        unchanged: object = "warn",
        verify_capture: object = SAMPLE_SHARE,
    ) -> PutRequest:
        """A put to `ref` as of now, checked as far as it can be before its state is known.

        Raises:
            InvalidOptionError, InvalidNameError: an argument is not what it must be.
        """
        checks = require_checks(unchanged, verify_capture)
        said = asked(engine, ref, step=step, metrics=metrics, metadata=metadata, expect=expect, codec=codec, delta=delta, checks=checks)
        return self.as_of_now(engine, said)

    def as_of_now(self, engine: Engine, asked: "Asked", *, sync: bool = True) -> PutRequest:
        """A put as of now; asks the log, or goes by what is known of it."""
        if sync:
            engine.log.sync()
        view = engine.log.view()
        parent, expected = self.parent(view, asked.ref), self.expected(view, asked.ref, asked.expect)
        coding = engine.codecs.coding(asked.ref, asked.codec, asked.delta)
        return PutRequest(asked.ref, asked.step, parent, expected, asked.metadata, asked.metrics, coding, asked.checks)

    def parent(self, view: RefTable, ref: str) -> Digest | None:
        """What a new snapshot continues: what this handle last put or restored on the ref; for others, the ref's head."""
        if ref in self._refs:
            return self._refs[ref].current
        branch = view.branch(ref)
        return branch.root if branch else self._restored


class Asked(NamedTuple):
    """What a put says besides the state, checked as far as it can be without asking the log."""

    ref: str
    step: int | None
    expect: object
    metadata: bytes
    metrics: dict[str, float]
    codec: CodecName | None
    delta: DeltaOption
    checks: Checks

    def sampling_of_copies(self, number: int) -> "tuple[Sampling, Asked]":
        """What of the put of that number is compared with its copies; and the put, in which nothing is to be read a second time then."""
        sampling = Sampling(turn_of(None, number), self.checks.verify_capture)
        return sampling, self._replace(checks=self.checks._replace(verify_capture=0.0))


def asked(
    engine: Engine,
    ref: str,
    *,
    step: object = None,
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, object] | None = None,
    expect: object = LAST_SEEN,
    codec: object = None,
    delta: object = None,
    checks: Checks,
) -> Asked:
    """Checks what a put says.

    Raises:
        InvalidOptionError, InvalidNameError: an argument is not what it must be.
    """
    validate_ref_name(ref)
    packed_metadata, checked_metrics = encode_metadata(metadata), check_metrics(metrics)
    if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__")):
        raise InvalidOptionError(f"step must be an integer, not {step!r}", object_id="step")
    number = None if step is None else step.__index__()
    if number is not None and not 0 <= number <= MAX_STEP:
        raise InvalidOptionError(f"step {number} must be from 0 to {MAX_STEP}", object_id="step")
    if not (expect is None or isinstance(expect, LastSeen | Anything | Snapshot | str)):
        raise InvalidOptionError(f"expect must be a root, tsck.ANY or None, not {type(expect).__name__}", object_id="expect")
    engine.require_writable()
    codec_name = None if codec is None else require_name(codec)
    return Asked(ref, number, expect, packed_metadata, checked_metrics, codec_name, require_delta(delta), checks)
