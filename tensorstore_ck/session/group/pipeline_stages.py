"""Checks that ranks with different layouts, such as the stages of a pipeline, can be one snapshot: data that several have must be equal.

Otherwise a restore could not know which one is meant. Rank 0 does this from parts that no snapshot names yet, once per set of layouts.
"""

from collections.abc import Sequence
from typing import Any, Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import locate_blocks
from tensorstore_ck.engine.read.block_reader import BufferTarget, OpenPart, read_at_places, wanted_blocks
from tensorstore_ck.engine.write.publish import read_part
from tensorstore_ck.format.layout import Layout, decode_layout
from tensorstore_ck.format.merge_layout_parts import LayoutConflictError, MergedLayout
from tensorstore_ck.format.part import Part, decode_values, part_name
from tensorstore_ck.format.part_index import PartIndex
from tensorstore_ck.session.group.rank_messages import named_ranks

READERS: Final = 8
ADVICE: Final = (
    "stages and experts need names of their own, such as layer numbers that count from the first stage; key an optimizer's state by names, "
    "with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict and flatten_optimizer_state_dict=True; and put "
    "values of one rank into rank_state="
)

Cut = dict[tuple[Any, ...], list[tuple[int, bytes]]]
"""Region -> (where it begins, id or bytes) of each of its blocks."""


class PipelineStage:
    """The ranks with one layout: a `merge_layout_parts.LayoutPart` over their parts."""

    def __init__(self, engine: Engine, ranks: tuple[int, ...], ulids: Sequence[Ulid]) -> None:
        """`ulids`: of the parts of these ranks."""
        self.ranks = ranks
        self.name = part_name(ulids[0])
        self._engine = engine
        self._ulids = ulids
        self._first = read_part(engine, ulids[0])
        self._held: list[tuple[Part, PartIndex]] = []
        self.layout: Layout = decode_layout(self._blob(0), f"the layout of {self.name}")
        self.values: Sequence[Any] = decode_values(self._first, self.name)

    def blob(self, index: int) -> bytes:
        """The verified bytes of a large value."""
        return self._blob(index + 1)  # the layout comes first

    def stored(self, tensor: int) -> Cut:
        """The blocks of a tensor that all these ranks have stored."""
        blocks_of: Cut = {}
        for part, plan in self._plans():
            for held in plan.of(tensor):
                blocks = blocks_of.setdefault((held.region.is_flat, held.region.offsets, held.region.sizes), [])
                if held.is_inline:
                    blocks.append((held.start, bytes(part.inline[held.first : held.first + held.lengths[0]])))
                start = held.start
                for row in held.rows:
                    blocks.append((start, part.block_id(row)))
                    start += int(part.extents["raw"][row])
        return {region: sorted(blocks) for region, blocks in blocks_of.items()}

    def _plans(self) -> list[tuple[Part, PartIndex]]:
        if not self._held:
            plans: dict[int, tuple[Part, PartIndex]] = {}

            def plan(number: int) -> None:
                name = part_name(self._ulids[number])
                part, block_bytes = read_part(self._engine, self._ulids[number]), self._engine.config.block_bytes
                plans[number] = part, PartIndex(self.layout, part, self.ranks, block_bytes=block_bytes, name=name)

            for_each(range(len(self._ulids)), plan, READERS)
            self._held = [plans[number] for number in range(len(self._ulids))]
        return self._held

    def _blob(self, index: int) -> bytes:
        part = self._first
        memory = bytearray(int(part.blobs["size"][index]))
        opened = OpenPart(part, self.name, locate_blocks(self._engine, self._engine.log.view(), part), lambda _: "a large value")
        first = int(part.blobs["blocks"][:index].sum())
        rows = range(first, first + int(part.blobs["blocks"][index]))
        read_at_places(self._engine, wanted_blocks(opened, rows, 0, BufferTarget(memoryview(memory))))
        return bytes(memory)


def contradiction(stages: Sequence[PipelineStage]) -> str:
    """The difference between the stages, as text; empty if they can be one snapshot."""

    def words(what: str, path: str, sides: Sequence[int]) -> str:
        who = " and ".join(named_ranks(stages[side].ranks) for side in sides)
        return f"{who} {what} {path!r}: {ADVICE}"

    try:
        merged = MergedLayout(stages)
    except LayoutConflictError as exc:
        return words("have different containers, shapes or types as", exc.path, exc.parts)
    for conflict in merged.numbered_tensors:
        return words("have a tensor under the same number, which may mean another parameter on each,", conflict.path, conflict.parts)
    for conflict in merged.value_conflicts:
        return words("have different values as", conflict.path, conflict.parts)
    for tensor, places in merged.shared_tensors.items():
        (first, number), *others = places
        expected = stages[first].stored(number)
        for other, at in others:
            stored = stages[other].stored(at)
            name, sides = merged.layout.tensors[tensor].name, (first, other)
            if stored.keys() != expected.keys():
                return words("cut one tensor in different ways, so that it cannot be seen whether it is the same on both,", name, sides)
            if stored != expected:
                return words("have tensors that are not equal as", name, sides)
    return ""
