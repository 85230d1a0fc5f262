"""Who holds and who writes what, for any layout: every element is written once, and a part's regions come back as given."""

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_shape_and_offset
from torch.distributed.tensor.placement_types import Replicate
from torch.distributed.tensor.placement_types import Shard as TorchShard

from tensorstore_ck.engine.interfaces import ByteTarget
from tensorstore_ck.engine.read.box_copy import BoxTarget
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format import block_assignment
from tensorstore_ck.format.block_assignment import (
    Region,
    assign_blocks,
    decode_regions,
    encode_regions,
    overlap,
    regions_of_rank,
    regions_of_tensor,
    row_boxes,
)
from tensorstore_ck.format.layout import ExplicitRegions, Layout, Sharding, Spread, TensorSpec
from tensorstore_ck.format.sharding import BoxBounds, Mesh, Shard
from tests.effort import effort

MIB = 1 << 20


class Spreadings(NamedTuple):
    """Tensors spread over ranks that have one layout."""

    layout: Layout
    alike: tuple[int, ...]
    explicit: dict[int, list[ExplicitRegions]]
    """Of each rank."""

    def held(self, rank: int) -> list[Region]:
        return regions_of_rank(self.layout, rank, self.alike, self.explicit[rank])


def slices(box: BoxBounds) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(*box, strict=True))


def cuts(draw: st.DrawFn, extent: int) -> list[tuple[int, int]]:
    """Neighbouring intervals that make up `extent`; some may be empty."""
    ends = sorted(draw(st.lists(st.integers(0, extent), max_size=4)))
    return [(start, stop - start) for start, stop in pairwise([0, *ends, extent])]


@st.composite
def spreadings(draw: st.DrawFn) -> Spreadings:
    ranks = tuple(sorted(draw(st.sets(st.integers(0, 11), min_size=1, max_size=8))))
    meshes = []
    for _ in range(draw(st.integers(1, 2))):
        shape = draw(st.sampled_from([shape for shape in [(1,), (2,), (3,), (8,), (2, 2), (2, 4), (2, 2, 2)] if prod(shape) <= len(ranks)]))
        meshes.append(Mesh(shape, tuple(draw(st.permutations(ranks))[: prod(shape)])))
    tensors: list[TensorSpec] = []
    spreads: list[Spread] = []
    explicit: dict[int, list[ExplicitRegions]] = {rank: [] for rank in ranks}
    for number in range(draw(st.integers(1, 4))):
        spec = TensorSpec(f"t{number}", "x", draw(st.sampled_from([1, 2, 3, 8])), tuple(draw(st.lists(st.integers(0, 24), max_size=3))))
        kind: Any = draw(st.sampled_from(["mesh", "mesh", "mesh", None, "boxes", "flat"]))
        tensors.append(spec)
        if kind is None:
            spreads.append(None)
        elif kind == "mesh":
            mesh = draw(st.integers(0, len(meshes) - 1))
            shard = st.builds(Shard, st.integers(0, max(len(spec.shape) - 1, 0)), st.sampled_from([1, 1, 2, 3, 4]))
            placement = st.one_of(st.none(), shard) if spec.shape else st.none()
            spreads.append(Sharding(mesh, tuple(draw(placement) for _ in meshes[mesh].shape)))
        else:
            spreads.append(kind)
            shape = (prod(spec.shape),) if kind == "flat" else spec.shape
            boxes = [BoxBounds((), ())]
            for extent in shape:
                along = cuts(draw, extent)
                boxes = [BoxBounds((*box.offsets, start), (*box.sizes, size)) for box in boxes for start, size in along]
            owners = [draw(st.sampled_from(ranks)) for _ in boxes]
            for rank in ranks:
                own = tuple(box for box, owner in zip(boxes, owners, strict=True) if owner == rank and 0 not in box.sizes)
                explicit[rank].append(ExplicitRegions(number, own))
    return Spreadings(Layout(tensors, None, (), meshes, spreads), ranks, explicit)


def written(found: Spreadings, rank: int, target_bytes: int) -> Iterator[tuple[Region, int, list[int]]]:
    """(region, first byte, lengths of blocks) that a rank writes."""
    held = found.held(rank)
    for share in assign_blocks(found.layout, held, rank, target_bytes):
        yield held[share.region], share.start, share.lengths


@given(spreadings(), st.sampled_from([64, 256, 1024]), st.sampled_from([1, 100, 1000]))
def test_every_element_is_written_once(found: Spreadings, target_bytes: int, run_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_assignment, "MIN_RUN_BYTES", run_bytes)
        patch.setattr(block_assignment, "INLINE_TENSOR_BYTES", 32)
        counts = [np.zeros(spec.shape, int) for spec in found.layout.tensors]
        starts: dict[Region, list[int]] = {}
        for rank in found.alike:
            for region, start, lengths in written(found, rank, target_bytes):
                spec = found.layout.tensors[region.tensor]
                assert rank in region.replicas
                assert sum(length % spec.item_bytes for length in lengths) == start % spec.item_bytes == 0
                first, last = start // spec.item_bytes, (start + sum(lengths)) // spec.item_bytes
                at = first
                for box, begin in region.pieces(spec, first, last):
                    assert begin == at
                    at += prod(box.sizes)
                    counts[region.tensor][slices(box)] += 1
                assert at == last
                ends = np.cumsum([start, *lengths]).tolist()
                starts.setdefault(region, []).extend(ends[:-1])
    assert all((count == 1).all() for count in counts)
    for region, begun in starts.items():  # the replicas go by the same blocks
        spec = found.layout.tensors[region.tensor]
        lengths = [region.size_bytes(spec)] if region.size_bytes(spec) <= 32 else region.block_lengths(spec, target_bytes)
        assert sorted(begun) == np.cumsum([0, *lengths]).tolist()[:-1]


@settings(max_examples=effort(40, 200))
@given(spreadings())
def test_each_rank_holds_what_all_know_of_it(found: Spreadings) -> None:
    for tensor in range(len(found.layout.tensors)):
        every = list(
            regions_of_tensor(
                found.layout,
                tensor,
                found.alike,
                lambda rank, tensor: [box for each in found.explicit[rank] if each.tensor == tensor for box in each.boxes],
            )
        )
        assert len(set(every)) == len(every)
        held = {rank: {region for region in found.held(rank) if region.tensor == tensor} for rank in found.alike}
        for rank, own in held.items():
            assert own == {region for region in every if rank in region.replicas}


@settings(max_examples=effort(40, 200))
@given(spreadings())
def test_regions_of_a_mesh_are_those_of_torch(found: Spreadings) -> None:
    """As long as a rank holds one box; what it holds in several has no offset in torch. See `tests/format/test_sharding.py`."""
    for tensor, spread in enumerate(found.layout.spreads):
        if not isinstance(spread, Sharding) or any(shard and shard.split_factor > 1 for shard in spread.placements):
            continue
        mesh, spec = found.layout.meshes[spread.mesh], found.layout.tensors[tensor]
        placements = [Replicate() if shard is None else TorchShard(shard.dim) for shard in spread.placements]
        for rank in found.alike:
            own = [BoxBounds(region.offsets, region.sizes) for region in found.held(rank) if region.tensor == tensor]
            coordinate = mesh.coordinate(rank)
            if coordinate is None:
                assert own == []
                continue
            shape, offset = torch_shape_and_offset(spec.shape, mesh.shape, list(coordinate), placements)
            assert own == ([] if 0 in shape else [BoxBounds(tuple(offset), tuple(shape))])


@pytest.mark.parametrize(("ranks", "per_rank_mib"), [(2, 1000), (3, 160), (8, 160)])
def test_replicas_write_about_the_same(ranks: int, per_rank_mib: int) -> None:
    """A model of many tensors that all ranks hold: within 10 %, and nobody less than one long run of it."""
    rng = np.random.default_rng(ranks)
    tensors: list[TensorSpec] = []
    missing = ranks * per_rank_mib * MIB
    while missing > 0:
        rows = int(rng.choice([1, 7, 1000, 4096, 12_000, 50_000]))
        tensors.append(TensorSpec(f"t{len(tensors)}", "bfloat16", 2, (rows, int(rng.choice([1, 128, 1024])))))
        missing -= tensors[-1].size_bytes
    for spread, meshes in ((None, ()), (Sharding(0, (None,)), (Mesh((ranks,), tuple(range(ranks))),))):
        layout = Layout(tensors, None, (), meshes, [spread] * len(tensors))
        found = Spreadings(layout, tuple(range(ranks)), {rank: [] for rank in range(ranks)})
        bytes_of = [sum(sum(lengths) for _, _, lengths in written(found, rank, 4 * MIB)) for rank in range(ranks)]
        assert sum(bytes_of) == sum(spec.size_bytes for spec in tensors)
        assert max(bytes_of) <= 1.1 * min(bytes_of)
        for rank in range(ranks):
            numbers = [region.tensor for region, _, _ in written(found, rank, 4 * MIB)]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))


def test_small_replicated_states_are_written_by_one_rank() -> None:
    tensors = [TensorSpec(f"t{number}", "x", 1, (20 * MIB,)) for number in range(6)]
    found = Spreadings(Layout(tensors, None), (3, 5, 9), {rank: [] for rank in (3, 5, 9)})
    assert [len(list(written(found, rank, 4 * MIB))) for rank in (3, 5, 9)] == [6, 0, 0]
    patched = Spreadings(Layout([*tensors, tensors[0]._replace(name="more")], None), *found[1:])
    assert [sum(sum(lengths) for _, _, lengths in written(patched, rank, 4 * MIB)) // MIB for rank in (3, 5, 9)] == [72, 68, 0]


@settings(max_examples=effort(40, 200))
@given(spreadings())
def test_regions_come_back_as_given(found: Spreadings) -> None:
    for rank in found.alike:
        assert decode_regions(found.layout, encode_regions(found.explicit[rank]), "a part") == found.explicit[rank]


@given(spreadings(), st.lists(st.integers(-2, 30), max_size=12), st.binary(max_size=3))
def test_malformed_regions_are_refused(found: Spreadings, numbers: list[int], tail: bytes) -> None:
    """Whatever is decoded lies within its tensor."""
    try:
        told = decode_regions(found.layout, np.array(numbers, "<i8").tobytes() + tail, "a part")
    except CorruptObjectError:
        return
    assert encode_regions(told) == np.array(numbers, "<i8").tobytes()
    for tensor, boxes in told:
        shape = found.layout.tensors[tensor].shape
        for box in boxes:
            assert len(list(row_boxes(box.sizes, 0, prod(box.sizes)))) == 1
            within = np.zeros((prod(shape),) if found.layout.spreads[tensor] == "flat" else shape, bool)[slices(box)]
            assert within.shape == box.sizes
            assert min(box.offsets, default=0) >= 0


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_a_run_of_elements_is_a_few_boxes(sizes: list[int], data: st.DataObject) -> None:
    elements = np.arange(prod(sizes)).reshape(sizes)
    start = data.draw(st.integers(0, elements.size))
    stop = data.draw(st.integers(start, elements.size))
    covering = [BoxBounds(*box) for box in row_boxes(tuple(sizes), start, stop)]
    assert [element for box in covering for element in elements[slices(box)].flatten().tolist()] == list(range(start, stop))
    assert len(covering) <= max(2 * len(sizes) - 1, 1)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> BoxBounds:
    offsets = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    return BoxBounds(offsets, tuple(draw(st.integers(1, extent - offset)) for extent, offset in zip(shape, offsets, strict=True)))


class Writing(ByteTarget):
    """`ByteTarget` without memory, that notes what came."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.came = np.zeros(size, int)

    def memory(self) -> None:
        return None

    def write(self, start: int, data: memoryview) -> None:
        assert data.nbytes == len(data)
        self.data[start : start + len(data)] = data
        self.came[start : start + len(data)] += 1


class Remembering(ByteTarget):
    """`ByteTarget` with memory."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)

    def memory(self) -> memoryview:
        return memoryview(self.data)

    def write(self, start: int, data: memoryview) -> None:
        raise AssertionError("there is memory")


@given(st.lists(st.integers(1, 7), max_size=4).map(tuple), st.booleans(), st.data())
def test_any_region_fills_any_box(shape: tuple[int, ...], is_flat: bool, data: st.DataObject) -> None:
    """What of the box lies in the region arrives, at its offset and once, however the region is cut into blocks."""
    spec = TensorSpec("t", "int16", 2, shape)
    whole = np.arange(1, prod(shape) + 1, dtype="<i2").reshape(shape)
    stored = data.draw(boxes_in((prod(shape),) if is_flat else shape))
    box = data.draw(boxes_in(shape))
    region = Region(0, *stored, is_flat, (0,))
    held = np.zeros(shape, bool)
    (held.reshape(-1) if is_flat else held)[slices(stored)] = True
    source = (whole.reshape(-1) if is_flat else whole)[slices(stored)].tobytes()
    ends = sorted(data.draw(st.sets(st.integers(0, len(source) // 2), max_size=4)) | {0, len(source) // 2})
    writing, remembering = Writing(2 * prod(box.sizes)), Remembering(2 * prod(box.sizes))
    for first, last in pairwise(ends):
        lies_in = held.copy()
        lies_in[...] = False
        lies_in.reshape(-1)[whole[held][first:last] - 1] = True
        assert region.overlaps(spec, box, first, last) == bool(lies_in[slices(box)].any())
        for target in (writing, remembering):
            BoxTarget(region, spec, box, target).write(2 * first, memoryview(source)[2 * first : 2 * last])
    expected = np.where(held, whole, 0)[slices(box)].astype("<i2").tobytes()
    assert bytes(writing.data) == bytes(remembering.data) == expected
    assert (writing.came == np.repeat(held[slices(box)].reshape(-1), 2)).all()


@given(st.lists(st.integers(1, 7), max_size=4).map(tuple), st.booleans(), st.data())
def test_a_region_whose_elements_come_in_the_order_of_a_box_is_read_into_it(
    shape: tuple[int, ...], is_flat: bool, data: st.DataObject
) -> None:
    """So a flattened tensor is read straight into its destination, as a box of whole rows is."""
    whole = np.arange(prod(shape)).reshape(shape)
    stored = data.draw(boxes_in((prod(shape),) if is_flat else shape))
    box = data.draw(boxes_in(shape))
    held = (whole.reshape(-1) if is_flat else whole)[slices(stored)].reshape(-1).tolist()
    wanted = whole[slices(box)].reshape(-1).tolist()
    before = Region(0, *stored, is_flat, (0,)).elements_before(TensorSpec("t", "int16", 2, shape), box)
    if before is None:
        assert any(np.diff(numbers).max(initial=1) > 1 for numbers in (held, wanted))
    else:
        common = [(held[at], wanted[at - before]) for at in range(len(held)) if 0 <= at - before < len(wanted)]
        assert common == [(number, number) for number in held if number in wanted]


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.data())
def test_overlap(shape: tuple[int, ...], data: st.DataObject) -> None:
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    left, right, common = (np.zeros(shape, bool) for _ in range(3))
    left[slices(one)] = right[slices(other)] = True
    found = overlap(one, other)
    assert (found is None) == (not (left & right).any())
    if found is not None:
        common[slices(found)] = True
        assert (common == (left & right)).all()


def test_a_tensor_without_given_regions_is_refused() -> None:
    layout = Layout([TensorSpec("t", "x", 1, (4,))], None, (), (), ["boxes"])
    with pytest.raises(CorruptObjectError, match="rank 1 does not list its regions of tensor 't'"):
        regions_of_rank(layout, 1, (0, 1), [])


def test_a_local_tensor_of_dtensor_in_several_boxes() -> None:
    """Rows 0-3 and 8-11, as the issue has it."""
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    layout = Layout([TensorSpec("t", "x", 4, (16, 3))], None, (), [mesh], [Sharding(0, (Shard(0, 2), None))])
    assert regions_of_rank(layout, 1, (0, 1, 2, 3)) == [
        Region(0, (0, 0), (4, 3), False, (0, 1)),
        Region(0, (8, 0), (4, 3), False, (0, 1)),
    ]
    assert torch.arange(16).chunk(2)[1].chunk(2)[0].tolist() == [8, 9, 10, 11]
