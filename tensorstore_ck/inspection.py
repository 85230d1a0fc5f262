"""What `show` and `diff` tell of snapshots: from records, parts and layouts alone; no tensor's blocks are read.

Free of torch. Two snapshots of one store cut a tensor of the same dtype and shape alike, so that their blocks are compared row
by row; where dtype or shape changed, as sets of block ids.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tensorstore_ck.envelope import pack_body
from tensorstore_ck.ids import DIGEST_BYTES, ulid_text
from tensorstore_ck.layout import TensorSpec
from tensorstore_ck.part import Part
from tensorstore_ck.reader import SnapshotReader
from tensorstore_ck.record import decode_metadata, record_name
from tensorstore_ck.snapshot import Snapshot, SnapshotDetails
from tensorstore_ck.tree import leaves, parse
from tensorstore_ck.values import describe as describe_value

Change = Literal["added", "removed", "changed"]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor that two snapshots do not hold alike."""

    name: str
    change: Change
    old: tuple[str, tuple[int, ...], int] | None
    """(dtype, shape, bytes) in the old snapshot."""
    new: tuple[str, tuple[int, ...], int] | None
    changed_bytes: int
    """Bytes of the new tensor's blocks that are not the old one's; of a small tensor, the bytes that differ."""


@dataclass(frozen=True, slots=True)
class ValueChange:
    """One value that two snapshots do not hold alike."""

    path: str
    change: Change
    old: Any
    """For display."""
    new: Any


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """What changed from one snapshot to another. Metrics, metadata and step are in the snapshots themselves."""

    old: Snapshot
    new: Snapshot
    tensors: tuple[TensorChange, ...]
    values: tuple[ValueChange, ...]
    unchanged_tensors: int
    unchanged_values: int
    changed_bytes: int
    """Of all tensors that were added or changed."""
    tensor_bytes: int
    """Of all tensors of the new snapshot."""
    layout_changed: bool
    """Names, dtypes, shapes, order, containers or ``requires_grad`` differ."""


def describe(reader: SnapshotReader) -> SnapshotDetails:
    """Metadata, tensors and values of a snapshot."""
    part = reader.part
    places = np.unique(part.extents[["pack", "entry"]], return_index=True)[1]
    return SnapshotDetails(
        Snapshot.from_info(reader.info),
        decode_metadata(reader.record, record_name(reader.info.ulid)),
        tuple((spec.name, spec.dtype, spec.shape, spec.size_bytes) for spec in reader.layout.tensors),
        {path: _shown(reader, value) for path, value in _values(reader).items()},
        int(part.extents["stored"][places].sum(dtype=np.int64)),
        tuple(ulid_text(pack) for pack in part.packs),
    )


def diff_snapshots(old: SnapshotReader, new: SnapshotReader) -> SnapshotDiff:
    """What changed from `old` to `new`."""
    tensors = _tensor_changes(old, new)
    values = _value_changes(old, new)
    new_tensors = new.layout.tensors
    return SnapshotDiff(
        Snapshot.from_info(old.info),
        Snapshot.from_info(new.info),
        tuple(tensors),
        tuple(values),
        len(new_tensors) - sum(change.new is not None for change in tensors),
        len(new.values) - sum(change.change != "removed" for change in values),
        sum(change.changed_bytes for change in tensors),
        sum(spec.size_bytes for spec in new_tensors),
        old.part.layout_id != new.part.layout_id,
    )


def names_of_rows(reader: SnapshotReader, hit: npt.NDArray[np.bool_]) -> list[str]:
    """The tensors, and the paths of the values, that have a block in an extent row that is set in `hit`."""
    blobs = [number for number in range(1, len(reader.part.blobs)) if hit[_slice(_blob_rows(reader.part, number))].any()]
    names = [path for path, value in _values(reader).items() if _blob_number(value) in blobs] if blobs else []
    for number, spec in enumerate(reader.layout.tensors):
        if hit[_slice(reader.tensor_rows(number))].any():
            names.append(spec.name)
    return names


def _tensor_changes(old: SnapshotReader, new: SnapshotReader) -> list[TensorChange]:
    before = {spec.name: (number, spec) for number, spec in enumerate(old.layout.tensors)}
    changes = []
    for number, spec in enumerate(new.layout.tensors):
        found = before.pop(spec.name, None)
        if found is None:
            changes.append(TensorChange(spec.name, "added", None, _form(spec), spec.size_bytes))
            continue
        same_form = spec[1:] == found[1][1:]
        changed_bytes = _changed_bytes(old, found[0], new, number, same_grid=same_form)
        if changed_bytes or not same_form:
            changes.append(TensorChange(spec.name, "changed", _form(found[1]), _form(spec), changed_bytes))
    changes += [TensorChange(name, "removed", _form(spec), None, 0) for name, (_, spec) in before.items()]
    return changes


def _form(spec: TensorSpec) -> tuple[str, tuple[int, ...], int]:
    return spec.dtype, spec.shape, spec.size_bytes


def _changed_bytes(old: SnapshotReader, old_tensor: int, new: SnapshotReader, new_tensor: int, *, same_grid: bool) -> int:
    old_rows, new_rows = old.tensor_rows(old_tensor), new.tensor_rows(new_tensor)
    if not new_rows:
        before, after = old.inline_bytes(old_tensor), new.inline_bytes(new_tensor)
        if len(before) != len(after):
            return len(after)
        return int(np.count_nonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8)))
    before_ids, after_ids = _ids(old, old_rows), _ids(new, new_rows)
    lengths = new.part.extents["raw"][_slice(new_rows)].astype(np.int64)
    if same_grid:
        differs = (before_ids != after_ids).any(axis=1)
    else:
        known = {row.tobytes() for row in before_ids}
        differs = np.array([row.tobytes() not in known for row in after_ids])
    return int(lengths[differs].sum())


def _ids(reader: SnapshotReader, rows: range) -> npt.NDArray[np.uint8]:
    return np.frombuffer(_id_bytes(reader.part, rows), np.uint8).reshape(-1, DIGEST_BYTES)


def _value_changes(old: SnapshotReader, new: SnapshotReader) -> list[ValueChange]:
    before = _values(old)
    changes = []
    for path, value in _values(new).items():
        if path not in before:
            changes.append(ValueChange(path, "added", None, _shown(new, value)))
            continue
        earlier = before.pop(path)
        if _identity(old, earlier) != _identity(new, value):
            changes.append(ValueChange(path, "changed", _shown(old, earlier), _shown(new, value)))
    changes += [ValueChange(path, "removed", _shown(old, value), None) for path, value in before.items()]
    return changes


def _values(reader: SnapshotReader) -> dict[str, Any]:
    """Path -> encoded value, in order."""
    tree = parse(reader.layout, len(reader.values), f"the layout of {reader.name}")
    return {leaf.path: reader.values[leaf.index] for leaf in leaves(tree) if leaf.kind == "value"}


def _identity(reader: SnapshotReader, value: Any) -> object:
    """What is equal for equal values: NaNs and 1 and True told apart by their bits, large values by their blocks."""
    blob = _blob_number(value)
    if blob is None or not 0 < blob < len(reader.part.blobs):
        return pack_body(value)
    return value[1], _id_bytes(reader.part, _blob_rows(reader.part, blob))


def _shown(reader: SnapshotReader, value: Any) -> object:
    blob = _blob_number(value)
    if blob is None or not 0 < blob < len(reader.part.blobs):
        return describe_value(value)
    kind = {"m": "value", "l": "list", "u": "tuple"}.get(value[1], value[1])
    return f"({kind}, {int(reader.part.blobs['size'][blob]):,} bytes)"


def _blob_number(value: Any) -> int | None:
    """Which of the part's blobs holds a value, if one does; blob 0 is the layout, and values count from the one after it."""
    is_blob = type(value) is list and len(value) == 3 and value[0] == "b" and type(value[2]) is int
    return value[2] + 1 if is_blob else None


def _blob_rows(part: Part, blob: int) -> range:
    start = int(part.blobs["blocks"][:blob].sum(dtype=np.int64))
    return range(start, start + int(part.blobs["blocks"][blob]))


def _id_bytes(part: Part, rows: range) -> bytes:
    return part.ids[rows.start * DIGEST_BYTES : rows.stop * DIGEST_BYTES]


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)
