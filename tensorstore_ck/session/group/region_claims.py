"""Which rank stores which reported region of a tensor: boxes, or intervals of the flattened tensor. Pure arithmetic.

One rank stores a region that several hold. Different regions must not overlap, and together they must cover the tensor.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from tensorstore_ck.format.layout import ExplicitRegions, Layout, TensorSpec
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.session.group.rank_messages import named_ranks

Held = tuple[int, BoxBounds]
"""A rank, and a region of a tensor that it holds."""


class RegionClaim(NamedTuple):
    """A region that several ranks hold."""

    holders: tuple[int, ...]
    keeper: int
    """The rank that stores it."""


def uncovered(layout: Layout, reported: Mapping[int, Sequence[ExplicitRegions]]) -> str:
    """The tensor that the ranks with a layout do not hold exactly once, as text; empty if there is none.

    `reported`: rank -> its regions of tensors whose regions do not follow from the layout.
    """
    held = held_of(reported)
    for tensor, spread in enumerate(layout.spreads):
        problem = gap(layout.tensors[tensor], held.get(tensor, ()), is_flat=spread == "flat") if isinstance(spread, str) else ""
        if problem:
            return problem
    return ""


def held_of(reported: Mapping[int, Sequence[ExplicitRegions]]) -> dict[int, list[Held]]:
    """Tensor -> its regions, and the ranks that hold them."""
    held: dict[int, list[Held]] = {}
    for rank, explicit in reported.items():
        for tensor, boxes in explicit:
            held.setdefault(tensor, []).extend((rank, box) for box in boxes)
    return held


def gap(spec: TensorSpec, held: Sequence[Held], *, is_flat: bool) -> str:
    """The elements of a tensor that are not held exactly once, as text; empty if there are none."""
    problem = _problem((prod(spec.shape),) if is_flat else spec.shape, held)
    return f"{problem} of tensor {spec.name!r}, of shape {list(spec.shape)}" if problem else ""


def once(held: Sequence[Held]) -> list[Held]:
    """The regions without repetitions: each one only for the first rank that holds it."""
    first: dict[BoxBounds, int] = {}
    for rank, box in held:
        first.setdefault(box, rank)
    return [(rank, box) for rank, box in held if first[box] == rank]


def claims(tensors: Iterable[tuple[TensorSpec, Sequence[Held]]]) -> list[dict[BoxBounds, RegionClaim]]:
    """The rank that stores each region that several hold, as one map for each tensor. Balances the bytes."""
    owners: list[dict[BoxBounds, RegionClaim]] = []
    several: list[tuple[int, int, BoxBounds, tuple[int, ...]]] = []
    load: dict[int, int] = {}
    for number, (spec, held) in enumerate(tensors):
        owners.append({})
        holders: dict[BoxBounds, list[int]] = {}
        for rank, box in sorted(set(held)):
            holders.setdefault(box, []).append(rank)
        for box, ranks in holders.items():
            size_bytes = prod(box.sizes) * spec.item_bytes
            if len(ranks) > 1:
                several.append((size_bytes, number, box, tuple(sorted(ranks))))
            else:
                load[ranks[0]] = load.get(ranks[0], 0) + size_bytes
    for size_bytes, number, box, together in sorted(several, key=lambda claim: (-claim[0], *claim[1:])):
        keeper = min(together, key=lambda rank: (load.get(rank, 0), rank))
        load[keeper] = load.get(keeper, 0) + size_bytes
        owners[number][box] = RegionClaim(together, keeper)
    return owners


def _problem(shape: tuple[int, ...], held: Sequence[Held]) -> str:
    elements = prod(shape)
    total = sum(prod(box.sizes) for _, box in held)
    if total < elements:
        return f"no rank holds {elements - total} of {elements} elements"
    # All pairs are compared.
    starts = np.array([box.offsets for _, box in held], np.int64).reshape(len(held), len(shape))
    ends = starts + np.array([box.sizes for _, box in held], np.int64).reshape(starts.shape)
    for at in range(len(held)):
        meets = ((starts[at + 1 :] < ends[at]) & (ends[at + 1 :] > starts[at])).all(axis=1)
        if meets.any():
            other = at + 1 + int(np.argmax(meets))
            return f"{named_ranks(sorted({held[at][0], held[other][0]}))} hold some elements twice"
    return "" if total == elements else f"{total} elements are held where there are {elements}"
