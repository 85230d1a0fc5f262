"""Finds the first bad snapshot of a branch by a binary search. Pins snapshots that may be the answer, so that nothing frees them."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple, Self

from tensorstore_ck.common.buffers import batches
from tensorstore_ck.common.ids import Digest, ulid_text
from tensorstore_ck.common.units import parse_seconds
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import InvalidOptionError, NotFoundError, PermissionDeniedError, StoreError
from tensorstore_ck.log import Op, RefTable, SnapshotRow
from tensorstore_ck.log.address import resolve
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.list_refs import training_line

Verdict = Literal["good", "bad", "skip"]


def first_bad(good: int, bad: int, verdict: Callable[[int], Verdict]) -> tuple[int, int]:
    """The last good and the first bad position in a row that is good at `good`, bad at `bad`, and turns once between them.

    Between the two that are returned lie only positions with the verdict ``skip``. No position is tested twice; without skips some
    log2(bad - good) are tested. If the row turns more than once, one of the turns is found.
    """
    skipped = set[int]()
    missed = 0
    while left := [at for at in range(good + 1, bad) if at not in skipped]:
        at = left[min(int(len(left) * _fraction(missed)), len(left) - 1)]
        match verdict(at):
            case "good":
                good, missed = at, 0
            case "bad":
                bad, missed = at, 0
            case "skip":
                skipped.add(at)
                missed += 1
    return good, bad


def _fraction(missed: int) -> float:
    """1/2, 1/4, 3/4, 1/8, 7/8, ...: after skips the search moves away from the middle, since untestable snapshots often lie together."""
    share = 0.5 ** ((missed + 1) // 2 + 1)
    return share if missed % 2 or not missed else 1 - share


PIN_SECONDS: Final = 86_400.0
"""How long a test may take: pins are renewed between tests, and those of a bisect that was killed expire."""
_OPERATIONS: Final = 1000
"""The most operations in one log entry."""
_logger: Final = logging.getLogger("tensorstore_ck")

IsBad = Callable[[Snapshot], bool | None]
"""Whether a snapshot is bad; None: it cannot be tested."""


class Tested(NamedTuple):
    """The outcome of one test."""

    snapshot: Snapshot
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Bisection:
    """The snapshots between which a branch turned bad."""

    last_good: Snapshot
    first_bad: Snapshot
    skipped: tuple[Snapshot, ...]
    """Between the two, oldest first: these could not be tested, and one of them may be the first bad one."""
    tested: tuple[Tested, ...]
    """The tests in their order."""

    def __repr__(self) -> str:
        between = f", {len(self.skipped)} not tested between them" if self.skipped else ""
        return f"Bisection(first bad {self.first_bad!r}, last good {self.last_good!r}{between})"


def bisect(
    engine: Engine,
    ref: str,
    is_bad: IsBad,
    *,
    good: str | None = None,
    bad: str | None = None,
    pin_for: float | str = PIN_SECONDS,
    unpinned_unsafe: bool = False,
    tested: Callable[[Tested], object] = lambda outcome: None,
) -> Bisection:
    """See `Store.bisect`. `tested` is called after each test."""
    seconds = None if unpinned_unsafe else parse_seconds(pin_for, "pin_for")
    if seconds is not None:
        engine.require_writable("bisect() with pins (unpinned_unsafe=True has none)")
    line = _line(engine.log.newest_view(), ref, good, bad)
    first, last, done = 0, len(line) - 1, list[Tested]()
    with _Pins(engine, ref, seconds) as pins:

        def verdict(at: int) -> Verdict:
            nonlocal first, last
            pins.keep(line[first : last + 1])
            snapshot = Snapshot.from_info(line[at])
            answer = is_bad(snapshot) if pins.is_live(line[at]) else None
            if not pins.is_live(line[at]):
                answer = None  # a snapshot that was freed during its test proves nothing
            outcome: Verdict = "skip" if answer is None else "bad" if answer else "good"
            first, last = (at if outcome == "good" else first), (at if outcome == "bad" else last)
            done.append(Tested(snapshot, outcome))
            tested(done[-1])
            return outcome

        start = _end(line, ref, [0] if good is not None else range(last), verdict, wanted="good", address=good)
        stop = _end(line, ref, [last] if bad is not None else range(last, start, -1), verdict, wanted="bad", address=bad)
        first_bad(start, stop, verdict)
    between = tuple(Snapshot.from_info(info) for info in line[first + 1 : last])
    return Bisection(Snapshot.from_info(line[first]), Snapshot.from_info(line[last]), between, tuple(done))


def _line(view: RefTable, ref: str, good: str | None, bad: str | None) -> list[SnapshotRow]:
    """The snapshots from `good` to `bad` in the history of a branch, oldest first, each once."""
    if view.branch(ref) is None:
        resolve(view, ref)  # says what there is
        raise InvalidOptionError(f"{ref!r} is not a branch: only a branch has a history to search", object_id=ref)
    visits = list(view.history(ref, newest_first=False))
    if bad is not None:
        root = resolve(view, bad).info.root
        until = max((at for at, info in enumerate(visits) if info.root == root), default=None)
        if until is None:
            raise InvalidOptionError(f"{bad!r} is not in the history of {ref!r}", object_id="bad")
        visits = visits[: until + 1]
    line = training_line(visits)
    if good is not None:
        root = resolve(view, good).info.root
        begin = next((at for at, info in enumerate(line) if info.root == root), None)
        if begin is None:
            before = f" before {bad!r}" if bad is not None else ""
            raise InvalidOptionError(f"{good!r} is not in the history of {ref!r}{before}", object_id="good")
        line = line[begin:]
    if len(line) < 2:
        raise NotFoundError(f"there is nothing to search: {ref!r} has no two snapshots there", object_id=ref)
    return line


def _end(
    line: Sequence[SnapshotRow],
    ref: str,
    positions: Iterable[int],
    verdict: Callable[[int], Verdict],
    *,
    wanted: Verdict,
    address: str | None,
) -> int:
    """The first of `positions` that can be tested, which must be as `wanted`; `address` is the user's choice of an end."""
    for at in positions:
        outcome = verdict(at)
        if outcome == wanted:
            return at
        if address is not None:
            what = "cannot be tested" if outcome == "skip" else f"is {outcome}"
            raise InvalidOptionError(f"{address!r} {what}, but was given as {wanted}", object_id=wanted)
        if outcome == "bad":
            raise NotFoundError(f"{_named(line[at])} of {ref!r} is bad already: there is no good one before it", object_id=ref)
        if outcome == "good":
            raise NotFoundError(f"no bad snapshot of {ref!r} was found: {_named(line[at])} is good", object_id=ref)
    raise NotFoundError(f"there is nothing to search: no two snapshots of {ref!r} could be tested", object_id=ref)


def _named(info: SnapshotRow) -> str:
    return f"snapshot {info.root.hex()[:16]}{'' if info.step is None else f' (step {info.step})'}"


class _Pins:
    """The pins of one bisect: under an owner of its own, and with a date of expiry. A context manager; `seconds` None: no pins."""

    def __init__(self, engine: Engine, ref: str, seconds: float | None) -> None:
        self._engine, self._seconds = engine, seconds
        self._owner, self._reason = f"bisect {ulid_text(engine.new_id())}", f"bisect of {ref}"
        self._renew_ns = 0
        """The time from which pins are renewed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._seconds is None:
            return
        try:
            self._unpin_all_but(())
        except StoreError as exc:
            _logger.warning("the pins of %r could not be removed, and stay until they expire: %s", self._owner, exc)

    def keep(self, infos: Sequence[SnapshotRow]) -> None:
        """Pins these snapshots, as far as they are still there, and no others. Raises `PermissionDeniedError` if this user may not pin."""
        if self._seconds is None:
            return
        now = self._engine.clock()
        if now >= self._renew_ns:
            self._pin(infos, now + int(self._seconds * 1e9))
            self._renew_ns = now + int(self._seconds * 1e8)
        self._unpin_all_but({info.root for info in infos})

    def is_live(self, info: SnapshotRow) -> bool:
        """Whether anything holds a snapshot; pins may have expired, or been removed."""
        self._engine.log.sync()
        return self._engine.log.view().is_live(info.ulid)

    def _pin(self, infos: Sequence[SnapshotRow], expires_ns: int) -> None:
        def pins(view: RefTable, batch: Sequence[SnapshotRow]) -> list[Op]:
            return [Op.pin(info.root, self._owner, self._reason, expires_ns) for info in batch if view.is_live(info.ulid)]

        try:
            for batch in batches(infos, lambda _: 1, _OPERATIONS):
                self._engine.log.append(partial(pins, batch=batch))
        except PermissionDeniedError as exc:
            raise PermissionDeniedError(
                f"bisect pins snapshots while it tests them, and may not: {exc}. `--unpinned-unsafe` (unpinned_unsafe=True) pins nothing",
                object_id=exc.object_id,
            ) from exc

    def _unpin_all_but(self, kept: Collection[Digest]) -> None:
        def build(view: RefTable) -> list[Op]:
            own = (pin.ulid for pin in view.pins() if pin.owner == self._owner)
            gone = [ulid for ulid in own if (info := view.snapshot(ulid)) is None or info.root not in kept]
            return [Op.unpin(ulid, self._owner, view) for ulid in gone[:_OPERATIONS]]

        while len(self._engine.log.append(build).ops) == _OPERATIONS:
            pass
