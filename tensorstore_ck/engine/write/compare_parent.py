"""Compares what one rank has written with earlier snapshots: which tensors changed, and how the step counters of optimizers moved.

Compares block ids, and the bytes of small tensors in the parts: no tensor is read. If something changed, which is the common case, only the
last snapshot is read. The step counters are those of the ``state_dict`` of every ``torch.optim`` optimizer, a dict with ``state`` or
``param_groups``, which hold a dict per parameter or group: Adam's ``state.<parameter>.step``, FusedAdam's ``param_groups.<n>.step``.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import DIGEST_BYTES
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.part_writer import WrittenPart
from tensorstore_ck.engine.write.request import SaveRequest
from tensorstore_ck.engine.write.suspicious_save import SaveFindings, StepCounts, snapshots_before, steps_between
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.codec import elements_of
from tensorstore_ck.format.layout import Layout, Node
from tensorstore_ck.format.part import Part, decode_values
from tensorstore_ck.log import RefTable, SnapshotRow

_GROUPS: Final = ("state", "param_groups")
_DICTS: Final = ("d", "o", "f", "c")


class StepCounter(NamedTuple):
    """One counter."""

    optimizer: str
    """The path of its optimizer's state; empty if that is the whole state."""
    kind: Literal["tensor", "value"]
    number: int
    """The tensor's number, or the value's."""


@dataclass(slots=True)
class StepCounters:
    """The counters of one layout."""

    found: list[StepCounter] = field(default_factory=list)
    tensors: set[int] = field(default_factory=set)
    """The numbers of those that are tensors."""
    has_values: bool = False
    """Whether there are others."""
    may_skip: bool = False
    """Whether the state has a gradient scaler, which lets optimizers skip steps."""
    weights: set[int] = field(default_factory=set)
    """The numbers of all other tensors of floating or complex numbers."""


def find_counters(captured: CapturedState) -> StepCounters:
    """The counters in the tree of a state's layout. The layout is searched once."""
    kept = captured.derived if captured.derived is not None else {}
    counters: StepCounters | None = kept.get(StepCounters)
    if counters is None:
        counters = StepCounters()
        _CounterSearch(captured.layout, counters).visit(captured.layout.tree, "", "", 0)
        specs = enumerate(captured.layout.tensors[:])
        counters.weights = {at for at, spec in specs if at not in counters.tensors and elements_of(spec.dtype, spec.item_bytes).is_float}
        kept[StepCounters] = counters
    return counters


class _CounterSearch:
    def __init__(self, layout: Layout, counters: StepCounters) -> None:
        self._tensors = layout.tensors[:]
        self._counters = counters
        self._holes = 0

    def visit(self, node: Node, path: str, optimizer: str, level: int) -> None:
        """`level`: 1 for the container of the dicts per parameter or group of `optimizer`, 2 for such a dict; else 0."""
        if type(node) is not list:
            self._holes += node is None
            return
        tag, attributes = node[0], None
        keys: Iterable[Any]
        if tag in _DICTS:
            keys, nodes = node[-2:] if tag == "f" else node[1:3]
            self._counters.may_skip |= "_growth_tracker" in keys
            if tag == "o" and node[3] is not False:
                attributes = [node[3]]
        elif tag in ("l", "u"):
            keys, nodes = range(len(node[1])), node[1]
        elif tag == "n":
            keys, nodes, optimizer, level = node[2], node[3], "", 0
        else:
            keys, nodes, level = (), (), 0
            attributes = [node[2]] if tag == "r" else None
        if level != 2 and list not in map(type, nodes):
            self._holes += nodes.count(None)
            keys = nodes = ()
        for key, child in zip(keys, nodes, strict=True):
            if level == 2 and key == "step":
                self._note(child, optimizer)
            if type(child) is not list:
                self._holes += child is None
            elif level:
                self.visit(child, path, optimizer, 2 if level == 1 else 0)
            elif type(key) is str and key in _GROUPS:
                self.visit(child, path, path, 1)
            else:
                self.visit(child, f"{path}.{key}" if path else f"{key}", "", 0)
        for child in attributes or ():
            self.visit(child, path, "", 0)

    def _note(self, node: Node, optimizer: str) -> None:
        if node is None:
            self._counters.found.append(StepCounter(optimizer, "value", self._holes))
            self._counters.has_values = True
            return
        number = node if type(node) is int else node[1] if node[0] == "t" else None
        if number is not None and set(self._tensors[number].shape) <= {1}:
            self._counters.found.append(StepCounter(optimizer, "tensor", number))
            self._counters.tensors.add(number)


LOOK_BACK: Final = 4
"""The number of a ref's last snapshots with which a save is compared, if it looks suspicious against the last one."""
_NUMBERS: Final = {
    dtype: struct.Struct(f"<{form}")
    for dtype, form in (("float64", "d"), ("float32", "f"), ("float16", "e"), ("int64", "q"), ("int32", "i"))
}
"""The dtypes of step counters."""


class _Predecessor(NamedTuple):
    """An earlier snapshot of the ref, and its part with the same tensors."""

    info: SnapshotRow
    part: Part


class ParentComparison:
    """Compares a part that one rank has written with its predecessors."""

    def __init__(self, engine: Engine, view: RefTable, written: WrittenPart, captured: CapturedState, request: SaveRequest) -> None:
        self._part = written.part
        self._tensors = written.tensors
        self._step = request.step
        self._past = _predecessors(engine, view, written.part, request)
        self._before = next(self._past, None)
        """The snapshot before this one; None if there is none that can be compared."""
        self._earlier: list[_Predecessor] = []
        """Those before it, as far as they were read."""
        self._counters = find_counters(captured)
        self._places: dict[int, tuple[struct.Struct, int]] = {}
        """The format and offset of counters that are small tensors inside the part."""
        inlined, counting, specs = written.tensors.plan.inlined, [*self._counters.tensors], captured.layout.tensors[:]
        starts = inlined.ends - inlined.ranges.sizes
        for position in np.flatnonzero(np.isin(inlined.ranges.tensors, counting)).tolist() if counting else ():
            tensor = int(inlined.ranges.tensors[position])
            if (number := _NUMBERS.get(specs[tensor].dtype)) is not None:
                self._places[tensor] = (number, int(starts[position]))

    def examine(self) -> SaveFindings:
        """The findings. Reads no more snapshots than necessary."""
        elements, non_finite = self._tensors.sample.finiteness
        findings, before = SaveFindings(elements=elements, non_finite=non_finite), self._before
        if before is not None:
            if non_finite:
                findings.non_finite_moved = sum(count for _, count in self._moved(before.part))
            findings.has_moved = self._has_moved(before.part)
            is_later = self._step is not None and before.info.step is not None and self._step > before.info.step
            if not findings.has_moved and is_later:
                findings.had_moved = any(self._has_moved(predecessor.part) for predecessor in self._all_earlier())
        if self._counters.found:
            self._count(findings)
        return findings

    # --- weights ------------------------------------------------------------------------------------------------------

    def _has_moved(self, before: Part) -> bool:
        return not self._counters.weights.isdisjoint(map(itemgetter(0), self._moved(before)))

    def _moved(self, before: Part) -> Iterator[tuple[int, int]]:
        """The blocks and small tensors that differ from an earlier part: the tensor, and how many of its sampled numbers are not finite."""
        plan, sample = self._tensors.plan, self._tensors.sample
        own, other = _tensor_ids(self._part), _tensor_ids(before)
        for row in np.flatnonzero((own != other).any(axis=1)).tolist():
            yield plan.blocks[row].tensor, sample.non_finite_rows.get(row, 0)
        small = plan.inlined.ranges.tensors[plan.inlined.differing(self._part.inline, before.inline)].tolist()
        for tensor in set(small):  # several regions of one tensor have one count
            yield tensor, sample.non_finite_inline.get(tensor, 0)

    # --- counters -----------------------------------------------------------------------------------------------------

    def _count(self, findings: SaveFindings) -> None:
        now, before = self._read_counters(self._part), self._before
        then = {} if before is None else self._read_counters(before.part)
        for name, values in now.items():
            counts = findings.counts[name] = StepCounts(min(values), max(values), self._counters.may_skip)
            if before is None or name not in then:
                continue
            counts.least_before, counts.most_before = min(then[name]), max(then[name])
            steps = steps_between(before.info.step, self._step)
            if steps and counts.most - counts.most_before != steps:
                self._look_back(name, before, counts)

    def _look_back(self, name: str, before: _Predecessor, counts: StepCounts) -> None:
        """Notes how the counters moved before. A single step does not count, since counters of micro-batches may move by one then, too."""
        for earlier in self._all_earlier():
            between = steps_between(earlier.info.step, before.info.step) or 0
            if between > 1 and (seen := self._read_counters(earlier.part).get(name)):
                counts.most_earlier, counts.steps_earlier = max(seen), between
                return

    def _read_counters(self, part: Part) -> dict[str, list[float]]:
        """The counters in a part with the same tensors, by optimizer."""
        values: Sequence[Any] = ()
        if self._counters.has_values:
            values = decode_values(part, "a part")
        counts: dict[str, list[float]] = {}
        for counter in self._counters.found:
            number: object = None
            if counter.kind == "value":
                number = values[counter.number] if counter.number < len(values) else None
            elif counter.number in self._places:
                form, offset = self._places[counter.number]
                (number,) = form.unpack_from(part.inline, offset)
            if type(number) in (int, float) and abs(cast(float, number)) < 2**53:
                counts.setdefault(counter.optimizer, []).append(cast(float, number))
        return counts

    # --- the snapshots before -----------------------------------------------------------------------------------------

    def _all_earlier(self) -> Iterator[_Predecessor]:
        """Up to `LOOK_BACK` snapshots before the one before this one, newest first."""
        for number in range(LOOK_BACK):
            if number == len(self._earlier):
                if (earlier := next(self._past, None)) is None:
                    return
                self._earlier.append(earlier)
            yield self._earlier[number]


def _predecessors(engine: Engine, view: RefTable, own: Part, request: SaveRequest) -> Iterator[_Predecessor]:
    """The snapshots before this one, newest first, as long as the part of this rank has the same tensors at the same positions."""
    for info in snapshots_before(view, request):
        try:
            record = engine.recent_record(info)
            if own.rank >= len(record.parts):
                return
            part = engine.read_part(record, own.rank)
        except StoreError:  # comparing must not make the save fail
            return
        is_match = part.layout_id == own.layout_id and part.world_size == own.world_size
        is_match = is_match and part.layout_of == own.layout_of and part.regions == own.regions
        if not (is_match and len(_tensor_ids(part)) == len(_tensor_ids(own)) and len(part.inline) == len(own.inline)):
            return
        yield _Predecessor(info, part)


def _tensor_ids(part: Part) -> npt.NDArray[np.uint64]:
    """The ids of the tensors' blocks, one row each."""
    first = int(part.blobs["blocks"].sum(dtype=np.int64))
    return np.frombuffer(part.ids, "<u8").reshape(-1, DIGEST_BYTES // 8)[first:]
