"""Checks that the ranks together hold every element of every tensor once. Pure arithmetic.

Tensors that are spread over a mesh cover themselves, if all ranks of the mesh have the layout; what only the parts know is added up.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from tensorstore_ck.layout import Explicit, Layout
from tensorstore_ck.ranks.wording import named_ranks
from tensorstore_ck.sharding import Box


def strangers(layout: Layout, alike: Sequence[int]) -> str:
    """Which ranks are in a mesh of the layout and have another one, in words; empty when none are."""
    own = set(alike)
    for mesh in layout.meshes:
        others = sorted(set(mesh.ranks) - own)
        if others:
            return (
                f"{named_ranks(others)} hold tensors together with {named_ranks(sorted(own & set(mesh.ranks)))}, but their states have "
                "other names, shapes or types: put what only some ranks have under names of their own, or into rank_state="
            )
    return ""


def uncovered(layout: Layout, told: Mapping[int, Sequence[Explicit]]) -> str:
    """Which tensor is not held exactly once by the ranks with a layout, in words; empty when all are.

    `told`: rank -> its regions of tensors whose regions do not follow from the layout.
    """
    for tensor, spread in enumerate(layout.spreads):
        if not isinstance(spread, str):
            continue
        spec = layout.tensors[tensor]
        shape = (prod(spec.shape),) if spread == "flat" else spec.shape
        held = [(rank, box) for rank, explicit in told.items() for each in explicit if each.tensor == tensor for box in each.boxes]
        problem = _problem(shape, held)
        if problem:
            return f"{problem} of tensor {spec.name!r}, of shape {list(spec.shape)}"
    return ""


def _problem(shape: tuple[int, ...], held: Sequence[tuple[int, Box]]) -> str:
    elements = prod(shape)
    total = sum(prod(box.sizes) for _, box in held)
    if total < elements:
        return f"no rank holds {elements - total} of {elements} elements"
    # Sorted by their first elements, boxes that meet are neighbours in most cases; the others are found by comparing all.
    starts = np.array([box.offsets for _, box in held], np.int64).reshape(len(held), len(shape))
    ends = starts + np.array([box.sizes for _, box in held], np.int64).reshape(starts.shape)
    for at in range(len(held)):
        meets = ((starts[at + 1 :] < ends[at]) & (ends[at + 1 :] > starts[at])).all(axis=1)
        if meets.any():
            other = at + 1 + int(np.argmax(meets))
            return f"{named_ranks(sorted({held[at][0], held[other][0]}))} hold some elements twice"
    return "" if total == elements else f"{total} elements are held where there are {elements}"
