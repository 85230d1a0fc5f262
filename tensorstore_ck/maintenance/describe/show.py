"""`show`: describes one snapshot, and lists its contents by name: tensors and values of all layouts, and of rank states under
``rank_state[rank]``.

It reads records, parts and layouts, and no blocks of tensors.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, Ulid, ulid_text
from tensorstore_ck.common.threads import REMOTE_THREADS, cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import raise_if_expired
from tensorstore_ck.engine.reachability import BlockLocations, locate_blocks
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.errors import DamageError
from tensorstore_ck.format.block_assignment import first_ranks
from tensorstore_ck.format.codec import codec_name
from tensorstore_ck.format.layout import Sharding, TensorSpec
from tensorstore_ck.format.part import Part
from tensorstore_ck.format.record import decode_metadata, record_name
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.format.tree import leaves, parse
from tensorstore_ck.format.values import describe as describe_value
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.log.snapshot import GroupCost, Snapshot, SnapshotDetails


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

    def __init__(self, engine: Engine, info: SnapshotInfo) -> None:
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


def first_part(name: str) -> str:
    """``model`` of ``model.layers.0.weight``."""
    return name.split(".", 1)[0]


class GroupCosts:
    """Sums over parts, without keeping them; each block counts once in its group."""

    def __init__(self, group_of: Callable[[str], str] = first_part) -> None:
        """`group_of`: name of a tensor -> its group."""
        self._group_of = group_of
        self._groups: dict[str, _Group] = {}

    def add(self, reader: SnapshotReader, part: Part, locations: BlockLocations) -> None:
        """Adds the tensors of a part; `reader` has its layout."""
        plan, prefix = reader.plan_of(part, reader.name), part_prefix(part)
        for number, spec in enumerate(reader.layout.tensors):
            group = self._groups.setdefault(self._group_of(prefix + spec.name), _Group())
            for held in plan.of(number):
                if held.is_inline:
                    group.raw_bytes += sum(held.lengths)
                    group.stored_bytes += sum(held.lengths)
                    continue
                extents = locations.extents[held.rows.start : held.rows.stop]
                ids = map(part.block_id, held.rows)
                group.add(zip(ids, extents["raw"].tolist(), extents["stored"].tolist(), extents["codec"].tolist(), strict=True))

    def groups(self) -> tuple[GroupCost, ...]:
        """The groups, by name."""
        by_name = sorted(self._groups.items())
        return tuple(GroupCost(name, group.raw_bytes, group.stored_bytes, dict(group.codecs)) for name, group in by_name)


class _Group:
    def __init__(self) -> None:
        self.raw_bytes = self.stored_bytes = 0
        self.codecs: Counter[str] = Counter()
        self._seen: set[Digest] = set()

    def add(self, blocks: Iterable[tuple[Digest, int, int, int]]) -> None:
        for block, raw, stored, codec in blocks:
            self.raw_bytes += raw
            if block not in self._seen:
                self._seen.add(block)
                self.stored_bytes += stored
                self.codecs[codec_name(codec)] += raw


def describe(engine: Engine, info: SnapshotInfo) -> SnapshotDetails:
    """Metadata, tensors and values of a snapshot."""
    return _describe(engine, info, GroupCosts())


def describe_with_costs(engine: Engine, info: SnapshotInfo) -> tuple[SnapshotDetails, Mapping[str, GroupCost]]:
    """As `describe`, with the cost of each tensor by its name."""
    by_tensor = GroupCosts(str)
    details = _describe(engine, info, GroupCosts(), by_tensor)
    return details, {cost.name: cost for cost in by_tensor.groups()}


def _describe(engine: Engine, info: SnapshotInfo, *costs: GroupCosts) -> SnapshotDetails:
    """The groups are those of the first of `costs`."""
    opened = OpenSnapshot(engine, info)
    tensors: list[tuple[str, str, tuple[int, ...], int]] = []
    values: dict[str, Any] = {}
    for contents in chain([opened.shared], map(opened.rank_state, range(opened.rank_states))):
        tensors += [(name, *tensor_form(tensor.spec)) for name, tensor in contents.tensors.items()]
        values |= {path: display(value) for path, value in contents.values.items()}
        for reader in contents.readers if contents is not opened.shared else ():
            _add(costs, reader, reader.part, locate_blocks(engine, engine.log.view(), reader.part))
    spread = {name: _placement(tensor) for name, tensor in opened.shared.tensors.items()}
    return SnapshotDetails(
        Snapshot.from_info(info),
        decode_metadata(opened.record, record_name(info.ulid)),
        opened.ranks,
        tuple(tensors),
        values,
        *_stored(engine, opened, costs),
        {name: placement for name, placement in spread.items() if placement},
        costs[0].groups(),
    )


def _placement(tensor: Tensor) -> str:
    """How a tensor is sharded, in the form of `SnapshotDetails.placements`."""
    layout = tensor.reader.layout
    spread = layout.spreads[tensor.number] if layout.spreads else None
    if not isinstance(spread, Sharding):
        return spread or ""
    along = [
        "R" if shard is None else f"S({shard.dim})" if shard.split_factor == 1 else f"_S({shard.dim}, {shard.split_factor})"
        for shard in spread.placements
    ]
    return f"{','.join(along)} on {'x'.join(map(str, layout.meshes[spread.mesh].shape))}"


def _add(costs: Sequence[GroupCosts], reader: SnapshotReader, part: Part, locations: BlockLocations) -> None:
    for cost in costs:
        cost.add(reader, part, locations)


def _stored(engine: Engine, opened: OpenSnapshot, costs: Sequence[GroupCosts]) -> tuple[int, tuple[str, ...]]:
    """Stored bytes of the distinct blocks of all parts, and their packs; adds the shared parts to `costs`."""
    reader_of = {rank: reader for reader in opened.shared.readers for rank in reader.ranks}
    packs: dict[Ulid, dict[int, int]] = {}
    lock = threading.Lock()

    def add(rank: int) -> None:
        part = opened.part(rank)
        locations = locate_blocks(engine, engine.log.view(), part)
        rows = locations.extents[["pack", "entry", "stored"]].tolist()
        with lock:
            if rank in reader_of:
                _add(costs, reader_of[rank], part, locations)
            for pack, entry, stored in rows:
                packs.setdefault(locations.packs[pack], {})[entry] = stored

    for_each(range(len(opened.record.parts)), add, cpu_threads() if engine.backend.is_local else REMOTE_THREADS)
    return sum(sum(blocks.values()) for blocks in packs.values()), tuple(ulid_text(pack) for pack in sorted(packs))
