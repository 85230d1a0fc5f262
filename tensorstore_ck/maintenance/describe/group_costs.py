"""Stored bytes and codecs per group of tensors: those with the same name up to the first dot; or of each tensor."""

from collections import Counter
from collections.abc import Callable, Iterable

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.reachability import BlockLocations
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.format.codec import codec_name
from tensorstore_ck.format.part import Part
from tensorstore_ck.log.snapshot import GroupCost
from tensorstore_ck.maintenance.describe.contents import part_prefix


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
                    group.add_inline(sum(held.lengths))
                    continue
                extents = locations.extents[held.rows.start : held.rows.stop]
                ids = map(part.block_id, held.rows)
                group.add(zip(ids, extents["raw"].tolist(), extents["stored"].tolist(), extents["codec"].tolist(), strict=True))

    def groups(self) -> tuple[GroupCost, ...]:
        """The groups, by name."""
        found = sorted(self._groups.items())
        return tuple(GroupCost(name, group.raw_bytes, group.stored_bytes, dict(group.codecs)) for name, group in found)


class _Group:
    def __init__(self) -> None:
        self.raw_bytes = self.stored_bytes = 0
        self.codecs: Counter[str] = Counter()
        self._seen: set[Digest] = set()

    def add_inline(self, size_bytes: int) -> None:
        self.raw_bytes += size_bytes
        self.stored_bytes += size_bytes

    def add(self, blocks: Iterable[tuple[Digest, int, int, int]]) -> None:
        for block, raw, stored, codec in blocks:
            self.raw_bytes += raw
            if block not in self._seen:
                self._seen.add(block)
                self.stored_bytes += stored
                self.codecs[codec_name(codec)] += raw
