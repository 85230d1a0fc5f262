"""`show`: describes one snapshot."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from tensorstore_ck.common.ids import Digest, Ulid, ulid_text
from tensorstore_ck.common.threads import REMOTE_THREADS, cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import BlockLocations, locate_blocks
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.format.codec import codec_name
from tensorstore_ck.format.layout import Sharding
from tensorstore_ck.format.part import Part
from tensorstore_ck.format.record import decode_metadata, record_name
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.snapshot import GroupCost, Snapshot, SnapshotDetails
from tensorstore_ck.maintenance.describe.contents import OpenSnapshot, Tensor, display, part_prefix, tensor_form


class GroupCosts:
    """Sums over parts, without keeping them; each block counts once in its group."""

    def __init__(self, group_of: Callable[[str], str] = lambda name: name.split(".", 1)[0]) -> None:
        """`group_of`: name of a tensor -> its group; by default ``model`` of ``model.layers.0.weight``."""
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


def describe(engine: Engine, info: SnapshotRow) -> SnapshotDetails:
    """Metadata, tensors and values of a snapshot."""
    return _describe(engine, info, GroupCosts())


def describe_with_costs(engine: Engine, info: SnapshotRow) -> tuple[SnapshotDetails, Mapping[str, GroupCost]]:
    """As `describe`, with the cost of each tensor by its name."""
    by_tensor = GroupCosts(str)
    details = _describe(engine, info, GroupCosts(), by_tensor)
    return details, {cost.name: cost for cost in by_tensor.groups()}


def _describe(engine: Engine, info: SnapshotRow, *costs: GroupCosts) -> SnapshotDetails:
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
