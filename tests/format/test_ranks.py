"""Layouts and parts of many ranks: what must hold between their fields, and that a few bytes cannot stand for too much work."""

import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest

from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.block_assignment import decode_regions, encode_regions
from tensorstore_ck.format.layout import MAX_BOXES, MAX_RANKS, ExplicitRegions, Layout, Sharding, TensorSpec, decode_layout
from tensorstore_ck.format.pack import MAX_BLOCK_BYTES
from tensorstore_ck.format.part import Part, decode_part
from tensorstore_ck.format.part_index import PartIndex
from tensorstore_ck.format.sharding import BoxBounds, Mesh, Shard
from tests.format import samples
from tests.format.samples import with_fields


def refused(part: Part, match: str) -> None:
    with pytest.raises(CorruptObjectError, match=match):
        decode_part(part.encode(), "a part")


def numbering(*numbers: int) -> bytes:
    return np.array(numbers, "<u2").tobytes()


def test_a_part_says_with_which_ranks_it_was_saved() -> None:
    """One of many ranks' does, one of a single rank need not, and a rank state does not."""
    alone, of_many, state = samples.part(), samples.spread_part(), samples.rank_state()
    for part in (alone, alone._replace(layout_of=b""), of_many, of_many._replace(layout_of=b""), state):
        assert decode_part(part.encode(), "a part").layout_of == part.layout_of
    for part in (of_many._replace(layout_of=None, regions=b""), state._replace(layout_of=b""), alone._replace(world_size=2)):
        refused(part, "lacks the layout numbers of its group")
    for wrong in (
        numbering(0, 0, 1, 0, 0),
        numbering(0, 0, 1, 0, 0, 1, 1),
        numbering(0, 0, 1, 0, 0, 1)[:-1],
        numbering(1, 1, 0, 1, 1, 0),
        numbering(0, 2, 1, 0, 0, 1),
        numbering(0, 0, 0, 0, 0, 0),
    ):
        refused(of_many._replace(layout_of=wrong), "by order of first appearance")
    for part in (of_many._replace(regions=of_many.regions[:-1]), alone._replace(regions=bytes(8)), state._replace(regions=bytes(8))):
        refused(part, "its regions")


def test_the_part_id_covers_with_whom_and_which_regions() -> None:
    many = samples.spread_part()
    logical = [
        samples.part()._replace(layout_of=b""),
        many._replace(layout_of=b""),
        many._replace(layout_of=numbering(0, 0, 1, 0, 0, 0)),
        many._replace(regions=b""),
        many._replace(regions=many.regions[:-8] + bytes(8)),
        many._replace(layout_of=many.layout_of + many.regions[:2] if many.layout_of else None, regions=many.regions[2:]),
        many._replace(rank=1),
    ]
    assert len({samples.part().part_id(), many.part_id(), *(other.part_id() for other in logical)}) == 2 + len(logical)


def spread(shape: tuple[int, ...], *placements: Shard | None, tensors: int = 1, ranks: int = 4, meshes: int = 1) -> Layout:
    mesh = (ranks,) if len(placements) < 2 else (ranks // 2, 2, *(1,) * (len(placements) - 2))
    specs = [TensorSpec(str(number), "uint8", 1, shape) for number in range(tensors)]
    return Layout(specs, None, (), [Mesh(mesh, tuple(range(ranks)))] * meshes, [Sharding(0, placements)] * tensors)


def changed_layout(**fields: Any) -> bytes:
    return with_fields("layout of ranks", **fields)


KINDS = samples.body_of(samples.SEALED["layout of ranks"].sample)["placements"]["kinds"]
RANKS = np.arange(4, dtype="<u4").tobytes()
MESHES = [[[2, 2], RANKS], [[4], RANKS]]


OF = samples.body_of(samples.SEALED["layout of ranks"].sample)["placements"]["of"]


def test_meshes_that_cannot_be() -> None:
    decode_layout(changed_layout(mesh=MESHES), "a layout")
    twice, far = RANKS[:12] + RANKS[:4], RANKS[:12] + (1 << 20).to_bytes(4, "little")
    shapes: list[tuple[Any, ...]] = [
        ([2, -2], RANKS),
        ([4, 0], b""),
        ([4], RANKS),
        ([2, 2] + [1] * 15, RANKS),
        ([1 << 33, 1 << 31], b""),
        ([True, 4], RANKS),
    ]
    shapes += [((2.0, 2), RANKS), ("22", RANKS)]
    ranks = [([2, 2], wrong) for wrong in (RANKS[:-4], RANKS[:-1], twice, far, "0123")]
    first: list[object] = [*map(list, shapes + ranks), [[2, 2], RANKS, 0], 7]
    for wrong in (MESHES[:1], None, *([each, MESHES[1]] for each in first)):
        with pytest.raises(CorruptObjectError):
            decode_layout(changed_layout(mesh=wrong), "a layout")


def test_placements_that_cannot_be() -> None:
    decode_layout(changed_layout(placements={"kinds": KINDS, "of": OF}), "a layout")
    meshes = [[mesh, [[0, 1]]] for mesh in (2, -1, True, 0)]
    dims = [[1, [[dim, 1]]] for dim in (2, -1)]
    splits = [[1, [[0, pieces]]] for pieces in (0, -1, (1 << 20) + 1, 1 << 63, True, 1.0)]
    shapes = [[1, [[0, 1], None]], [1, [[0]]], [1, ["01"]], [1, [0]], [1, None], [1], "rows", "xy", 0]
    for kind in (*meshes, *dims, *splits, *shapes):
        kinds = [kind if number == 1 else each for number, each in enumerate(KINDS)]
        with pytest.raises(CorruptObjectError):
            decode_layout(changed_layout(placements={"kinds": kinds, "of": OF}), "a layout")
    for of in (OF[:-2], OF[:-1], OF + OF[:2], b"", OF[:-2] + b"\xff\xff"):
        with pytest.raises(CorruptObjectError):
            decode_layout(changed_layout(placements={"kinds": KINDS, "of": of}), "a layout")


@pytest.mark.parametrize(
    "layout",
    [
        spread((1 << 40,), Shard(0, MAX_BOXES + 1)),
        spread((1 << 20, 1 << 20), Shard(0, 128), Shard(1, 64)),
        spread((1 << 20,), Shard(0, 128), Shard(0, 64)),
        spread((1 << 40,), Shard(0, 512), ranks=4096),
        spread((1 << 20,), Shard(0, MAX_BOXES), tensors=20),
        spread((1 << 20,), Shard(0, 200), tensors=1000),
    ],
    ids=["split", "two dims", "one dim", "ranks", "few tensors", "many tensors"],
)
def test_what_would_cost_too_much_is_neither_written_nor_read(layout: Layout) -> None:
    """A few bytes of placements can stand for any number of pieces."""
    with pytest.raises(UnsupportedValueError):
        _ = layout.encoded
    forged = samples.sealed_body("layout", msgpack.packb(forged_body(layout)))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObjectError):
            decode_layout(forged, "a layout")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_meshes_together_have_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_RANKS == 1 << 20
    monkeypatch.setattr("tensorstore_ck.format.layout.MAX_RANKS", 1 << 10)
    assert spread((8,), Shard(0), ranks=128, meshes=8).encoded
    layout = spread((8,), Shard(0), ranks=128, meshes=9)
    with pytest.raises(UnsupportedValueError):
        _ = layout.encoded
    with pytest.raises(CorruptObjectError):
        decode_layout(samples.sealed_body("layout", msgpack.packb(forged_body(layout))), "a layout")


def forged_body(layout: Layout) -> dict[str, Any]:
    """As `Layout.encoded` would make it."""
    count = len(layout.tensors)
    (placed,) = set(layout.spreads)
    assert isinstance(placed, Sharding)
    plain = samples.body_of(Layout(layout.tensors, None).encoded)
    mesh = [[list(mesh.shape), np.array(mesh.ranks, "<u4").tobytes()] for mesh in layout.meshes]
    kind = [0, [[*shard] if shard else None for shard in placed.placements]]
    return {**plain, "mesh": mesh, "placements": {"kinds": [kind], "of": bytes(2 * count)}}


def test_what_large_jobs_have_is_written_and_read() -> None:
    for layout in (
        spread((1 << 20, 64), Shard(0, 8), Shard(0), ranks=4096),
        spread((1 << 16,), Shard(0, 64), tensors=2000),
        spread((4, 0), Shard(0, 1 << 20)),
        spread((1 << 20,), Shard(0), ranks=1 << 14, meshes=8),
    ):
        assert decode_layout(layout.encoded, "a layout").spreads == layout.spreads


@pytest.mark.parametrize(
    ("spec", "sharding"),
    [((1 << 40,), Shard(0, 4096)), ((1 << 20, 1 << 20), Shard(0, 4096)), ((1 << 40,), Shard(0)), ((1 << 20, 1 << 20), None)],
)
def test_a_part_without_the_bytes_costs_nothing_to_refuse(spec: tuple[int, ...], sharding: Shard | None) -> None:
    """However many blocks its layout stands for."""
    ranks = 64
    layout = spread(spec, sharding, ranks=ranks)
    part = samples.spread_part()._replace(rank=0, world_size=ranks, layout_of=b"", regions=b"")
    part.extents["raw"] = MAX_BLOCK_BYTES  # a lie
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObjectError):
            PartIndex(layout, part, tuple(range(ranks)), 4 << 20, "a part")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def told(*numbers: int) -> bytes:
    return np.array(numbers, "<i8").tobytes()


def test_regions_come_back_and_those_that_cannot_be_are_refused() -> None:
    layout, part = samples.spread_layout(), samples.spread_part()
    found = decode_regions(layout, part.regions, "a part")
    assert [(each.tensor, len(each.boxes)) for each in found] == [(6, 2), (7, 1)]
    assert encode_regions(found) == part.regions
    assert decode_regions(layout, told(6, 0, 0, 7, 0, 0), "a part") == [ExplicitRegions(6, ()), ExplicitRegions(7, ())]
    box, wrong_boxes = (0, 0, 1, 1), [(0, 0, 0, 1), (0, 0, 41, 1), (-1, 0, 1, 1), ((1 << 63) - 1, 0, 1, 1)]
    headers = [(6,), (6, 2), (6, 2, 0), (6, 2, -1), (6, 2, 1 << 62), (6, 1, 1, 0, 1), (6, 2, 1, 0, 0, 1), (6, 2, 2, *box)]
    tensors = [(5, 1, 1, 0, 1), (0, 2, 1, *box), (9, 1, 1, 0, 1), (-1, 1, 1, 0, 1), (7, 1, 1, 0, 6001), (7, 2, 1, *box)]
    order = [(7, 1, 1, 0, 1, 6, 2, 1, *box), (6, 0, 0, 6, 0, 0)]
    cases = [told(*numbers) for numbers in (*headers, *tensors, *order, *((6, 2, 1, *wrong) for wrong in wrong_boxes))]
    for regions in (*cases, told(6, 0, 0)[:-1]):
        with pytest.raises(CorruptObjectError):
            decode_regions(samples.spread_layout(), regions, "a part")


def test_many_regions_of_nothing_cost_nothing() -> None:
    """A scalar's regions take no bytes."""
    layout = Layout([TensorSpec(str(number), "uint8", 1, ()) for number in range(2000)], None, (), [], ["boxes"] * 2000)
    assert decode_regions(layout, told(5, 0, 1), "a part") == [ExplicitRegions(5, (BoxBounds((), ()),))]
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObjectError):
            decode_regions(layout, told(*(number for tensor in range(2000) for number in (tensor, 0, 6000))), "a part")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
