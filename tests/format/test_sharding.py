"""The arithmetic of shards against torch's own: every rank must hold the very elements that DTensor would give it."""

from itertools import pairwise, product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import placement_types
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_shape_and_offset

from tensorstore_ck.format.sharding import BoxBounds, LocalBox, Mesh, Placement, Shard, boxes, holders_of, intervals, local_shape, replicas
from tests.effort import in_turns

Case = tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]
"""Tensor shape, mesh shape, placements."""


def torch_placement(placement: Placement) -> Any:
    if placement is None:
        return placement_types.Replicate()
    if placement.split_factor == 1:
        return placement_types.Shard(placement.dim)
    return placement_types._StridedShard(placement.dim, split_factor=placement.split_factor)


def split_by_torch(case: Case) -> dict[tuple[int, ...], torch.Tensor]:
    """What `distribute_tensor` gives each coordinate, for a tensor whose values are its own flat indexes."""
    shape, mesh_shape, placements = case
    held: dict[tuple[int, ...], torch.Tensor] = {(): torch.arange(prod(shape)).view(shape)}
    for count, placement in zip(mesh_shape, placements, strict=True):
        split: dict[tuple[int, ...], torch.Tensor] = {}
        for coordinate, tensor in held.items():
            shards = [tensor] * count
            if placement is not None:
                shards, _ = torch_placement(placement)._split_tensor(tensor, count, with_padding=False)
            split |= {(*coordinate, index): shard for index, shard in enumerate(shards)}
        held = split
    return held


def assembled(case: Case, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The same by our boxes."""
    shape = case[0]
    whole = torch.arange(prod(shape)).view(shape)
    local = torch.full(local_shape(intervals(*case, coordinate)), -1)
    for (offsets, sizes), local_offsets in boxes(*case, coordinate):
        source = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        target = tuple(slice(start, start + size) for start, size in zip(local_offsets, sizes, strict=True))
        local[target] = whole[source]
    return local


def check(case: Case) -> None:
    shape, mesh_shape, placements = case
    ranks = tuple(reversed(range(10, 10 + prod(mesh_shape))))
    mesh = Mesh(mesh_shape, ranks)
    held = split_by_torch(case)
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, (coordinate, expected) in zip(ranks, held.items(), strict=True):
        assert mesh.coordinate(rank) == coordinate
        local = assembled(case, coordinate)
        assert local.shape == expected.shape
        assert torch.equal(local, expected)
        torch_shape, torch_offset = torch_shape_and_offset(shape, mesh_shape, list(coordinate), list(map(torch_placement, placements)))
        assert tuple(local.shape) == tuple(torch_shape)
        if local.numel():
            assert boxes(*case, coordinate)[0].box.offsets == tuple(torch_offset)
            holders.setdefault(tuple(local.flatten().tolist()), []).append(rank)
        else:
            assert boxes(*case, coordinate) == []
            assert replicas(mesh, placements, shape, rank) == ()
        for runs in intervals(*case, coordinate):
            assert all(length > 0 for _, length in runs)
            assert all(start + length < following for (start, length), (following, _) in pairwise(runs))
    for same in holders.values():
        for rank in same:
            assert replicas(mesh, placements, shape, rank) == tuple(sorted(same))
    # Each element is held by one replica set.
    assert sorted(element for elements in holders for element in elements) == list(range(prod(shape)))


@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (8,), (2, 2), (2, 4), (3, 2), (2, 2, 2), (2, 1, 3)])
def test_every_placement_of_a_vector(mesh_shape: tuple[int, ...]) -> None:
    """The lengths take turns."""
    options = (None, Shard(0), Shard(0, 2), Shard(0, 3), Shard(0, 4)) if len(mesh_shape) < 3 else (None, Shard(0), Shard(0, 2), Shard(0, 4))
    every = list(product(options, repeat=len(mesh_shape)))
    for number, size in in_turns(range(max(len(every), 11)), (0, 1, 2, 3, 5, 7, 8, 9, 12, 16, 17)):
        check(((size,), mesh_shape, every[number % len(every)]))


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 4), (3, 2), (2, 2, 2)])
def test_every_placement_of_a_matrix(mesh_shape: tuple[int, ...]) -> None:
    """The shapes take turns."""
    every = list(product((None, Shard(0), Shard(1), Shard(0, 2), Shard(1, 2)), repeat=len(mesh_shape)))
    for number, shape in in_turns(range(len(every)), ((8, 8), (5, 3), (1, 6), (0, 4), (7, 0), (16, 9), (12, 2))):
        check((shape, mesh_shape, every[number]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(0, 11), max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    shard = st.builds(Shard, st.integers(0, max(len(shape) - 1, 0)), st.integers(1, 9))
    placement = st.one_of(st.none(), shard) if shape else st.none()
    return shape, mesh_shape, tuple(draw(placement) for _ in mesh_shape)


@given(cases())
def test_any_placement(case: Case) -> None:
    check(case)


def test_a_local_tensor_may_be_several_boxes_and_pieces_that_touch_are_one() -> None:
    first = [LocalBox(BoxBounds((0, 0), (4, 3)), (0, 0)), LocalBox(BoxBounds((8, 0), (4, 3)), (4, 0))]
    assert boxes((16, 3), (2, 2), (Shard(0, 2), None), (0, 1)) == first
    assert intervals((16, 3), (2, 2), (Shard(0, 2), None), (1, 0)) == [[(4, 4), (12, 4)], [(0, 3)]]
    assert intervals((8,), (1,), (Shard(0, 4),), (0,)) == [[(0, 8)]]


def test_replicas_of_a_scalar_outside_of_the_mesh_and_in_a_large_one() -> None:
    assert boxes((), (2,), (None,), (1,)) == [LocalBox(BoxBounds((), ()), ())]
    assert replicas(Mesh((2,), (4, 3)), (None,), (), 3) == (3, 4)
    mesh = Mesh((2,), (4, 3))  # rank 0 is not in it
    assert mesh.coordinate(0) is None
    assert replicas(mesh, (None,), (5,), 0) == ()
    mesh = Mesh((8, 512), tuple(range(4096)))
    assert replicas(mesh, (None, Shard(0)), (1 << 20, 4), 513) == tuple(range(1, 4096, 512))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.data())
def test_who_holds_an_interval_is_known_without_asking_all(size: int, pieces: int, count: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    found = holders_of(size, pieces, count, start, stop)
    held = [intervals((size,), (count,), (Shard(0, pieces),), (index,))[0] for index in range(count)]
    holding = [index for index, runs in enumerate(held) if any(max(first, start) < min(first + length, stop) for first, length in runs)]
    assert set(holding) <= set(found) <= set(range(count))
    if pieces == 1:
        assert holding == list(found)
