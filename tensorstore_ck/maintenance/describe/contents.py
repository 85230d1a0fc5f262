"""The contents of a snapshot by name: tensors and values of all layouts, and of rank states under ``rank_state[rank]``.

It reads records, parts and layouts, and no blocks of tensors.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tensorstore_ck.common.ids import DIGEST_BYTES
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import raise_if_expired
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.errors import DamageError
from tensorstore_ck.format.block_assignment import first_ranks
from tensorstore_ck.format.layout import TensorSpec
from tensorstore_ck.format.part import Part
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.format.tree import leaves, parse
from tensorstore_ck.format.values import describe as describe_value
from tensorstore_ck.log import SnapshotRow


class Tensor(NamedTuple):
    """One tensor; `number` is its index in the layout of `reader`."""

    reader: SnapshotReader
    number: int
    spec: TensorSpec


class StoredValue(NamedTuple):
    """One value, encoded as in the part of `reader`."""

    reader: SnapshotReader
    encoded: Any


class SnapshotContents:
    """The contents by name of all ranks' parts, with all their layouts, or of one rank state."""

    def __init__(self, readers: Sequence[SnapshotReader]) -> None:
        self.readers = readers
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, StoredValue] = {}
        for reader in readers:
            prefix = part_prefix(reader.part)
            for number, spec in enumerate(reader.layout.tensors):
                self.tensors.setdefault(prefix + spec.name, Tensor(reader, number, spec))
            for path, encoded in values_of(reader).items():
                self.values.setdefault(prefix + path, StoredValue(reader, encoded))


NOTHING: Final = SnapshotContents(())


class OpenSnapshot:
    """A snapshot. Rank states are opened one at a time, since there may be thousands."""

    def __init__(self, engine: Engine, info: SnapshotRow) -> None:
        self._engine = engine
        self.info = info
        first = SnapshotReader(engine, info)
        self.record = first.record
        self._budget = first.budget
        self.ranks = first.world_size
        self.rank_states = len(self.record.parts) - self.ranks
        self.shared = SnapshotContents([first, *map(self._reader, first_ranks(first.part.layout_of or b"")[1:])])

    def rank_state(self, rank: int) -> SnapshotContents:
        """The contents of one rank's state."""
        return SnapshotContents([self._reader(self.ranks + rank)]) if rank < self.rank_states else NOTHING

    def part(self, rank: int) -> Part:
        """A part, read without a reader, which would keep it."""
        try:
            return self._engine.read_part(self.record, rank)
        except DamageError as exc:
            raise_if_expired(self._engine.log, self.info, exc)
            raise

    def _reader(self, rank: int) -> SnapshotReader:
        return SnapshotReader(self._engine, self.info, rank, record=self.record, budget=self._budget)


def part_prefix(part: Part) -> str:
    """Prefix of the names of a rank state; empty for the state that all ranks share."""
    return f"rank_state[{part.rank - part.world_size}]." if part.rank >= part.world_size else ""


def tensor_form(spec: TensorSpec) -> tuple[str, tuple[int, ...], int]:
    """(dtype, shape, bytes)."""
    return spec.dtype, spec.shape, spec.size_bytes


def values_of(reader: SnapshotReader) -> dict[str, Any]:
    """Path -> encoded value, in order."""
    tree = parse(reader.layout, len(reader.values), f"the layout of {reader.name}")
    return {leaf.path: reader.values[leaf.index] for leaf in leaves(tree) if leaf.kind == "value"}


def identity(value: StoredValue) -> object:
    """A key that is equal for equal values: by encoded bytes (NaNs, 1 and True differ), large values by block ids."""
    blob, part = _blob_number(value.encoded), value.reader.part
    if blob is None or not 0 < blob < len(part.blobs):
        return pack_body(value.encoded)
    rows = blob_rows(part, blob)
    return value.encoded[1], part.ids[rows.start * DIGEST_BYTES : rows.stop * DIGEST_BYTES]


def display(value: StoredValue) -> object:
    """A value for display."""
    encoded, part = value.encoded, value.reader.part
    blob = _blob_number(encoded)
    if blob is None or not 0 < blob < len(part.blobs):
        return describe_value(encoded)
    kind = {"m": "value", "l": "list", "u": "tuple"}.get(encoded[1], encoded[1])
    return f"({kind}, {int(part.blobs['size'][blob]):,} bytes)"


def names_of_blobs(reader: SnapshotReader, blobs: Collection[int]) -> list[str]:
    """The paths of the values in some blobs of the reader's part."""
    return [path for path, value in values_of(reader).items() if _blob_number(value) in blobs] if blobs else []


def _blob_number(value: Any) -> int | None:
    """The number of the part's blob with a value, if it has one; blob 0 is the layout."""
    is_blob = type(value) is list and len(value) == 3 and value[0] == "b" and type(value[2]) is int
    return value[2] + 1 if is_blob else None


def blob_rows(part: Part, blob: int) -> range:
    """The extent rows of a blob."""
    start = int(part.blobs["blocks"][:blob].sum(dtype=np.int64))
    return range(start, start + int(part.blobs["blocks"][blob]))
