"""`diff`: compares two snapshots, and reads the blocks of tensors only where needed.

Snapshots with the same layout are compared part by part; parts with equal ids are not read. Otherwise blocks with the same elements of a
tensor of the same dtype and shape are compared by id, whichever ranks stored them. Where the snapshots cut a tensor differently (another
world size or placement), both are read and compared; where dtype or shape changed, blocks are compared as sets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from tensorstore_ck.common.buffers import Buffer, batches
from tensorstore_ck.common.html_table import html_table
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import WantedBox
from tensorstore_ck.engine.read.block_reader import BufferTarget
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.format.part import Part, part_name
from tensorstore_ck.format.part_index import RegionBytes
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.describe.contents import OpenSnapshot, SnapshotContents, Tensor, display, identity, tensor_form

COMPARE_BYTES: Final = 64 << 20
"""Bytes read at a time from each snapshot."""

Change = Literal["added", "removed", "changed"]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor that differs between two snapshots."""

    name: str
    change: Change
    old: tuple[str, tuple[int, ...], int] | None
    """(dtype, shape, bytes) in the old snapshot."""
    new: tuple[str, tuple[int, ...], int] | None
    changed_bytes: int
    """Bytes of the new tensor's blocks that differ; for a small tensor, the bytes that differ."""


@dataclass(frozen=True, slots=True)
class ValueChange:
    """One value that differs between two snapshots."""

    path: str
    change: Change
    old: Any
    """For display."""
    new: Any


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """The changes from one snapshot to another. Metrics, metadata and step are in the snapshots themselves."""

    old: Snapshot
    new: Snapshot
    tensors: tuple[TensorChange, ...]
    values: tuple[ValueChange, ...]
    unchanged_tensors: int
    unchanged_values: int
    changed_bytes: int
    """The changed bytes of all tensors that were added or changed."""
    tensor_bytes: int
    """The size of all tensors of the new snapshot."""
    layout_changed: bool
    """Names, dtypes, shapes, order, containers or ``requires_grad`` differ."""

    def __repr__(self) -> str:
        changes = f"{len(self.tensors):,} tensors and {len(self.values):,} values differ, {human_bytes(self.changed_bytes)}"
        return f"SnapshotDiff({self.old!r} -> {self.new!r}: {changes})"

    def _repr_html_(self) -> str:
        tensors = (
            [tensor.name, tensor.change, _form_text(tensor.old), _form_text(tensor.new), human_bytes(tensor.changed_bytes)]
            for tensor in self.tensors
        )
        values = ([value.path, value.change, value.old, value.new, ""] for value in self.values)
        return html_table(repr(self), ("name", "change", "old", "new", "bytes"), [*tensors, *values])


def _form_text(form: tuple[str, tuple[int, ...], int] | None) -> str:
    return "" if form is None else f"{form[0]} {'x'.join(map(str, form[1]))}"


def diff_snapshots(engine: Engine, old_info: SnapshotRow, new_info: SnapshotRow) -> SnapshotDiff:
    """The changes from `old_info` to `new_info`."""
    old, new = OpenSnapshot(engine, old_info), OpenSnapshot(engine, new_info)
    tensors, values = list[TensorChange](), list[ValueChange]()
    tensor_count = value_count = tensor_bytes = 0
    layout_changed = False
    for rank in (None, *range(max(old.rank_states, new.rank_states))):
        before, after = (opened.shared if rank is None else opened.rank_state(rank) for opened in (old, new))
        changed = _changed_by_part(old, new, before, after) if rank is None else {}
        tensors += _tensor_changes(before, after, changed)
        values += _value_changes(before, after)
        tensor_count, value_count = tensor_count + len(after.tensors), value_count + len(after.values)
        tensor_bytes += sum(tensor.spec.size_bytes for tensor in after.tensors.values())
        layout_changed |= _forms(before) != _forms(after)
    return SnapshotDiff(
        old=Snapshot.from_info(old.info),
        new=Snapshot.from_info(new.info),
        tensors=tuple(tensors),
        values=tuple(values),
        unchanged_tensors=tensor_count - sum(change.new is not None for change in tensors),
        unchanged_values=value_count - sum(change.change != "removed" for change in values),
        changed_bytes=sum(change.changed_bytes for change in tensors),
        tensor_bytes=tensor_bytes,
        layout_changed=layout_changed,
    )


def _forms(contents: SnapshotContents) -> list[object]:
    """The structure of a state, regardless of its sharding."""
    layouts = [reader.layout for reader in contents.readers]
    return [(list(layout.tensors), layout.tree, list(layout.storages)) for layout in layouts]


_Changed = dict[tuple[SnapshotReader, int], int]
"""(reader of the new snapshot, tensor) -> bytes of its blocks that differ."""


def _changed_by_part(opened_old: OpenSnapshot, opened_new: OpenSnapshot, old: SnapshotContents, new: SnapshotContents) -> _Changed:
    """Compares layouts that both snapshots have for the same ranks, part by part; parts with equal ids are not read."""
    if [reader.ranks for reader in old.readers] != [reader.ranks for reader in new.readers]:
        return {}
    changes: _Changed = {}
    for one, two in zip(old.readers, new.readers, strict=True):
        if one.part.layout_id != two.part.layout_id or one.part.layout_of != two.part.layout_of:
            continue
        changed = dict.fromkeys(((two, number) for number in range(len(two.layout.tensors))), 0)
        for rank in two.ranks:
            if opened_old.record.part_id(rank) == opened_new.record.part_id(rank):
                continue
            before, after = opened_old.part(rank), opened_new.part(rank)
            if before.regions != after.regions:
                break
            one.plan_of(before, part_name(opened_old.record.parts[rank]))
            plan = two.plan_of(after, part_name(opened_new.record.parts[rank]))
            for number in range(len(two.layout.tensors)):
                changed[two, number] += sum(_changed_in_part(before, after, held) for held in plan.of(number))
        else:
            changes |= changed
    return changes


def _changed_in_part(old: Part, new: Part, held: RegionBytes) -> int:
    """Differing bytes of the same region of two parts."""
    if held.is_inline:
        stop = held.first + held.lengths[0]
        return _differing(old.inline[held.first : stop], new.inline[held.first : stop])
    return sum(length for row, length in zip(held.rows, held.lengths, strict=True) if old.block_id(row) != new.block_id(row))


def _tensor_changes(old: SnapshotContents, new: SnapshotContents, changed: _Changed) -> list[TensorChange]:
    before = dict(old.tensors)
    changes = []
    for name, tensor in new.tensors.items():
        known_tensor = before.pop(name, None)
        if known_tensor is None:
            changes.append(TensorChange(name, "added", None, tensor_form(tensor.spec), changed_bytes=tensor.spec.size_bytes))
            continue
        is_same_form = tensor.spec[1:] == known_tensor.spec[1:]
        known = changed.get((tensor.reader, tensor.number))
        if known is not None and _is_same_place(known_tensor, tensor, old, new):
            changed_bytes = known
        else:
            changed_bytes = _changed_bytes(known_tensor, tensor) if is_same_form else _new_bytes(known_tensor, tensor)
        if changed_bytes or not is_same_form:
            old_form, new_form = tensor_form(known_tensor.spec), tensor_form(tensor.spec)
            changes.append(TensorChange(name, "changed", old_form, new_form, changed_bytes=changed_bytes))
    return changes + [TensorChange(name, "removed", tensor_form(tensor.spec), None, changed_bytes=0) for name, tensor in before.items()]


def _is_same_place(one: Tensor, two: Tensor, old: SnapshotContents, new: SnapshotContents) -> bool:
    return one.number == two.number and old.readers.index(one.reader) == new.readers.index(two.reader)


class TensorBlock(NamedTuple):
    """Some elements of a tensor and their content: a block id, or the bytes themselves if they are inline in a part."""

    boxes: tuple[BoxBounds, ...]
    size_bytes: int
    content: bytes
    is_inline: bool


def blocks_of(tensor: Tensor) -> Iterator[TensorBlock]:
    """The blocks of a tensor in all parts."""
    spec = tensor.spec
    for part, held in tensor.reader.stored(tensor.number):
        start, row = held.start, held.first
        for length in held.lengths:
            stop = start + length
            boxes = tuple(box for box, _ in held.region.pieces(spec, start // spec.item_bytes, stop // spec.item_bytes))
            content = part.inline[row : row + length] if held.is_inline else part.block_id(row)
            yield TensorBlock(boxes, length, content, held.is_inline)
            start, row = stop, row + 1


def _changed_bytes(old: Tensor, new: Tensor) -> int:
    """Changed bytes between two tensors of the same dtype and shape."""
    before = {block.boxes: block for block in blocks_of(old)}
    changed_bytes, unknown = 0, list[TensorBlock]()
    for block in blocks_of(new):
        same = before.get(block.boxes)
        if same is None:
            unknown.append(block)
        elif block.is_inline:
            changed_bytes += _differing(same.content, block.content)
        elif same.content != block.content:
            changed_bytes += block.size_bytes
    pieces = batches(unknown, lambda block: block.size_bytes, COMPARE_BYTES)
    return changed_bytes + sum(_read_changed_bytes(old, new, blocks) for blocks in pieces)


def _new_bytes(old: Tensor, new: Tensor) -> int:
    """Bytes of the blocks of `new` whose content is not in `old`."""
    known = {block.content for block in blocks_of(old)}
    return sum(block.size_bytes for block in blocks_of(new) if block.content not in known)


def _read_changed_bytes(old: Tensor, new: Tensor, blocks: Sequence[TensorBlock]) -> int:
    """Changed bytes in blocks of `new` that `old` cuts differently: reads both tensors there."""
    before, after = _read(old, blocks), _read(new, blocks)
    changed_bytes = at = 0
    for block in blocks:
        one, two = before[at : at + block.size_bytes], after[at : at + block.size_bytes]
        changed_bytes += _differing(one, two) if block.is_inline else block.size_bytes * (one != two)
        at += block.size_bytes
    return changed_bytes


def _read(tensor: Tensor, blocks: Sequence[TensorBlock]) -> memoryview:
    memory = memoryview(bytearray(sum(block.size_bytes for block in blocks)))
    wanted, at = list[WantedBox](), 0
    for block in blocks:
        for box in block.boxes:
            stop = at + prod(box.sizes) * tensor.spec.item_bytes
            wanted.append(WantedBox(tensor.number, box, BufferTarget(memory[at:stop])))
            at = stop
    tensor.reader.read_boxes(wanted)
    return memory


def _differing(one: Buffer, two: Buffer) -> int:
    return int(np.count_nonzero(np.frombuffer(one, np.uint8) != np.frombuffer(two, np.uint8)))


def _value_changes(old: SnapshotContents, new: SnapshotContents) -> list[ValueChange]:
    before = dict(old.values)
    changes = []
    for path, value in new.values.items():
        earlier = before.pop(path, None)
        if earlier is None:
            changes.append(ValueChange(path, "added", None, display(value)))
        elif identity(earlier) != identity(value):
            changes.append(ValueChange(path, "changed", display(earlier), display(value)))
    changes += [ValueChange(path, "removed", display(value), None) for path, value in before.items()]
    return changes
