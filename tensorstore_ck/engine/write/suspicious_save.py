"""Saves whose content contradicts their step: no weight moved though the step did, or an optimizer counted other steps.

The state is stored as it is, but the save warns or stops: users lost weeks to asynchronous saves that were bit-identical, and to optimizers
of another step than the weights. Each rank examines its own part (`compare_parent`); the rank that publishes judges the findings of all.
"""

import logging
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.request import SaveRequest
from tensorstore_ck.engine.write.sampled_checks import Finiteness
from tensorstore_ck.errors import StoreError, SuspiciousSaveError
from tensorstore_ck.format.record import STORE_KEY, decode_metadata, record_name
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.log import RefTable, SnapshotRow

_logger: Final = logging.getLogger("tensorstore_ck.engine")
JUMP: Final = 2.0
"""A save warns if the share of numbers that are not finite grows by more than this factor; unchanged tensors do not count."""


class SuspiciousSaveWarning(UserWarning):
    """A save was published as it was given, but its content contradicts its step, much of it is suddenly not finite, or ranks differ."""


@dataclass(slots=True)
class StepCounts:
    """The step counters of one optimizer, on one rank or on all."""

    least: float
    most: float
    may_skip: bool
    """Whether a gradient scaler lets it skip steps."""
    least_before: float | None = None
    """In the snapshot before; None if that is not comparable."""
    most_before: float | None = None
    most_earlier: float | None = None
    """In an earlier snapshot, if one was read."""
    steps_earlier: int = 0
    """The steps between these two snapshots: more than one."""

    def merge(self, other: "StepCounts") -> None:
        """Adds the counts of another rank."""
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self.least_before = _known(min, self.least_before, other.least_before)
        self.most_before = _known(max, self.most_before, other.most_before)
        self.most_earlier = _known(max, self.most_earlier, other.most_earlier)
        self.steps_earlier = max(self.steps_earlier, other.steps_earlier)


@dataclass(slots=True)
class SaveFindings:
    """The findings of one rank in its part, or of all ranks together."""

    has_moved: bool = True
    """Whether a floating tensor differs from the snapshot before, or that is unknown."""
    had_moved: bool = False
    """Whether one of the tensors that do not differ changed in earlier snapshots."""
    elements: int = 0
    """The elements in the sample."""
    non_finite: int = 0
    non_finite_moved: int = 0
    """Those in tensors that differ from the snapshot before."""
    counts: dict[str, StepCounts] = field(default_factory=dict)
    """By optimizer."""

    def record(self) -> Body:
        """The record that is sent to the other ranks."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: Body) -> "SaveFindings":
        """The findings that `record` encoded."""
        counts = {str(name): StepCounts(**fields) for name, fields in take(record, "counts", dict).items()}
        return cls(**{**record, "counts": counts})

    def merge(self, other: "SaveFindings") -> None:
        """Adds the findings of another rank."""
        self.has_moved |= other.has_moved
        self.had_moved |= other.had_moved
        self.elements += other.elements
        self.non_finite += other.non_finite
        self.non_finite_moved += other.non_finite_moved
        for name, counts in other.counts.items():
            self.counts.setdefault(name, counts).merge(counts)

    @property
    def finiteness(self) -> Finiteness:
        """The finiteness of the sample."""
        return Finiteness(self.elements, self.non_finite)


def judge(engine: Engine, view: RefTable, findings: SaveFindings, request: SaveRequest) -> None:
    """Warns of findings, or raises; nothing is published yet.

    Raises:
        SuspiciousSaveError: it must not be published.
    """
    how, sizes = "tensors may differ" if findings.has_moved else "no tensor differs", (findings.non_finite, findings.elements)
    _logger.debug("compared with the save before: %s; %d of %d numbers of the sample are not finite", how, *sizes)
    if findings.has_moved and not findings.counts and not findings.non_finite_moved:
        return  # nothing to compare with the save before
    ref, step, unchanged = request.ref, request.step, request.unchanged
    before = next(snapshots_before(view, request), None)
    doubts = "; ".join([] if unchanged == "ok" else _doubts(findings, before, step))
    if doubts and unchanged == "error":
        raise SuspiciousSaveError(
            f"nothing was published to {ref!r}: {doubts} (unchanged='warn' publishes it with a warning)", object_id=ref
        )
    address = ref if step is None else f"{ref}@{step}"
    if doubts:
        warnings.warn(
            f"{address}: {doubts} (unchanged='ok' is for saves that are meant to be so)",
            SuspiciousSaveWarning,
            stacklevel=user_stacklevel(),
        )
    if before is None or not findings.non_finite_moved:
        return
    moved, share = findings.non_finite_moved / findings.elements, findings.finiteness.share
    known = _noted_share(engine, before)
    if moved > JUMP * max(0.0, known - (share - moved)):
        warnings.warn(
            f"{address}: {share:.2%} of the floating numbers that were sampled are NaN or infinite, and {known:.2%} were in the save "
            f"before{_at(before)}: the training has likely diverged, and no save from here on may be worth resuming from",
            SuspiciousSaveWarning,
            stacklevel=user_stacklevel(),
        )


def _doubts(findings: SaveFindings, before: SnapshotRow | None, step: int | None) -> Iterator[str]:
    steps = steps_between(before.step, step) if before is not None else None
    if steps and before is not None and not findings.has_moved and findings.had_moved:
        yield (
            f"no floating tensor differs from the save before{_at(before)}, though the step moved on by {steps} and tensors changed "
            "in earlier saves: is the state that is saved still the one that is trained?"
        )
    for name, counts in findings.counts.items():
        title = f"the step counters of the optimizer{f' at {name!r}' if name else ''}"
        if counts.least != counts.most and (
            before is None or (counts.most_before is not None and counts.least_before == counts.most_before)
        ):
            yield f"{title} are from {counts.least:g} to {counts.most:g}: was it captured in the middle of a step?"
        expected = _expected(counts, before, steps)
        if expected is not None and before is not None:
            yield (
                f"{title} are at {counts.most:g}; in the save before{_at(before)} they were at {counts.most_before:g}, and {steps} steps "
                f"lie between, which makes {expected}: are the weights and the optimizer of one step?"
            )


def _expected(counts: StepCounts, before: SnapshotRow | None, steps: int | None) -> str | None:
    """What the counters should be; None if they are as expected, or if the expected value is unknown.

    They count what ``step=`` counts if they were equal or moved by the same number before. If they count something else, such as steps of
    several micro-batches, they must at least move as they did before.
    """
    then, earlier, most = counts.most_before, counts.most_earlier, counts.most
    if not steps or before is None or then is None or most == then + steps:
        return None
    if then == before.step or (earlier is not None and then - earlier == counts.steps_earlier):
        may_have_skipped = counts.may_skip and then + (steps > 1) <= most < then + steps
        return None if may_have_skipped else f"{then + steps:g}"
    is_stuck = most == then and earlier is not None and earlier < then - 1 and counts.steps_earlier <= steps
    return "more" if is_stuck else None


def _at(info: SnapshotRow) -> str:
    return "" if info.step is None else f" (step {info.step})"


def steps_between(first: int | None, second: int | None) -> int | None:
    """The steps from the first to the second, if positive."""
    return second - first if first is not None and second is not None and second > first else None


def snapshots_before(view: RefTable, request: SaveRequest) -> Iterator[SnapshotRow]:
    """The snapshots that a save continues, newest first; none for the first save to a ref, which may come from anywhere."""
    root, is_first = request.parent, True
    while root is not None:
        info = view.by_root(root) or next((info for _, info in view.all_staged() if info.root == root), None)
        if info is None or (is_first and info.ref != request.ref and view.branch(request.ref) is None):
            return
        yield info
        root, is_first = info.parent, False


def _noted_share(engine: Engine, info: SnapshotRow) -> float:
    """What a snapshot's metadata says of numbers that are not finite."""
    try:
        note = decode_metadata(engine.recent_record(info), record_name(info.ulid)).get(STORE_KEY)
    except StoreError:
        return 0.0
    share = note.get("non_finite") if isinstance(note, dict) else None
    return share if isinstance(share, float) else 0.0


def _known(choose: Any, one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else choose(one, other)
