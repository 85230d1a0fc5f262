"""Which leaves of a state become tensors of its layout: all; or, if some are views, all others, in their order, then extra tensors of
plain bytes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tensorstore_ck.engine.interfaces import ByteSource
from tensorstore_ck.format.tree import LeafNames
from tensorstore_ck.state.aliasing import AliasPlan, CoveringArea
from tensorstore_ck.state.byte_sources import Array, CopySource, MemorySource
from tensorstore_ck.state.tensor_table import ByteSources, TensorKind, TensorSpecs, TensorTable

NumberOf = Sequence[int] | Mapping[int, int]
"""A leaf, or ``-1 - i`` for extra i -> its number in the layout."""


class StoredTensors(NamedTuple):
    """The tensors of a layout."""

    leaves: Sequence[int]
    """The leaf of each."""
    number_of: NumberOf
    specs: TensorSpecs
    sources: ByteSources


def without_views(every: StoredTensors, table: TensorTable, aliases: AliasPlan, leaf_names: LeafNames) -> StoredTensors:
    """The tensors of the layout if leaves share memory, by the plan for that. Extra tensors take their names from `leaf_names`."""
    specs, sources = every.specs, every.sources
    leaves = [leaf for leaf in range(len(specs)) if leaf not in aliases.views]
    specs = specs.pick(
        leaves,
        [leaf_names.name(f"{specs.names[extra.first]}.__storage__") for extra in aliases.extras],
        [TensorKind("uint8", 1, (extra.stop - extra.start,), extra.stop - extra.start) for extra in aliases.extras],
    )
    sources = sources.pick(leaves, [_source_of(extra, table.objects[extra.first]) for extra in aliases.extras])
    leaves += [-1 - position for position in range(len(aliases.extras))]
    return StoredTensors(leaves, {leaf: number for number, leaf in enumerate(leaves)}, specs, sources)


def _source_of(extra: CoveringArea, first: torch.Tensor | Array) -> ByteSource:
    size = extra.stop - extra.start
    if isinstance(first, np.ndarray) or first.is_cpu:
        return MemorySource(extra.start, first, size)
    storage = first.untyped_storage()
    return CopySource(torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, extra.start - storage.data_ptr(), (size,), (1,)))
