"""Reads stored tensors piece by piece, so that no more than `BATCH_BYTES` of them are in memory, and turns elements into float64.

A strided view of another tensor is one piece: its elements are anywhere in that tensor.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tensorstore_ck.chunker import cut_box
from tensorstore_ck.common.buffers import batches
from tensorstore_ck.common.host_memory import require_memory
from tensorstore_ck.engine.interfaces import SnapshotContent, WantedBox
from tensorstore_ck.format.block_assignment import row_boxes
from tensorstore_ck.format.layout import dense_strides
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.format.tree import Leaf, leaves, parse
from tensorstore_ck.state.allocate import AnyDtype, LeafForm, TensorOrArray, byte_range, form_of, view_of
from tensorstore_ck.state.byte_sources import Array, new_array, target_of

PIECE_BYTES: Final = 16 << 20
"""The largest piece of one tensor: a few blocks."""
BATCH_BYTES: Final = 64 << 20
"""Bytes read together, so that all cores, or all connections to a remote store, have work."""
STEP_ELEMENTS: Final = 1 << 13
"""Elements converted at a time: they fit into a core's cache. From 10,000 on, torch's threads and numpy's BLAS wait for each other."""

Numbers = npt.NDArray[Any]
"""float64 or complex128."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a snapshot."""

    content: SnapshotContent
    leaf: Leaf
    form: LeafForm

    @property
    def dtype_name(self) -> str:
        """As in layouts."""
        leaf = self.leaf
        name: str = leaf.node[2] if leaf.kind == "view" else self.content.layout.tensors[leaf.index].dtype
        return name

    @property
    def base_name(self) -> str:
        """The name of the tensor that has its bytes: its own, or that of the tensor that it is a view of."""
        return self.content.layout.tensors[self.leaf.index].name

    @property
    def count(self) -> int:
        """The number of its elements."""
        return prod(self.form.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are one run of bytes, in order."""
        return self.form.strides == dense_strides(self.form.shape)


class Piece(NamedTuple):
    """Elements [first, last) of a tensor."""

    tensor: StoredTensor
    first: int
    last: int

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return (self.last - self.first) * self.tensor.form.dtype.itemsize


def stored_tensors(content: SnapshotContent) -> dict[str, StoredTensor]:
    """The tensors of a snapshot by name, in the state's order."""
    tree = parse(content.layout, len(content.values))
    return {leaf.path: StoredTensor(content, leaf, form_of(content.layout, leaf)) for leaf in leaves(tree) if leaf.kind != "value"}


def cut(*tensors: StoredTensor) -> list[tuple[int, int]]:
    """Cuts tensors of the same shape into the same pieces: elements [first, last), none of which is larger than `PIECE_BYTES`.

    The cuts of large tensors lie between blocks.
    """
    shape, count = tensors[0].form.shape, tensors[0].count
    if not count:
        return []
    if not all(tensor.is_contiguous for tensor in tensors):
        return [(0, count)]
    item_bytes = max(tensor.form.dtype.itemsize for tensor in tensors)
    lengths = cut_box((0,) * len(shape), shape, item_bytes, PIECE_BYTES) // item_bytes
    return list(pairwise(accumulate(lengths.tolist(), initial=0)))


def piece_batches(pieces: Iterable[tuple[Piece, ...]]) -> Iterator[list[tuple[Piece, ...]]]:
    """Pieces that are read together."""
    return batches(pieces, lambda group: sum(piece.size_bytes for piece in group), BATCH_BYTES)


def read_pieces(pieces: Sequence[Piece]) -> list[TensorOrArray]:
    """The verified elements of pieces of one snapshot, flat.

    Raises:
        NoSpaceError: a strided view does not fit into the memory that is free.
    """
    wanted, memories = list[WantedBox](), list[tuple[Array, LeafForm]]()
    for piece in pieces:
        tensor = piece.tensor
        form = _form_of_piece(piece)
        start, stop = byte_range(form)
        require_memory(stop - start + piece.last - piece.first, f"to look at {tensor.leaf.path!r}", "leave it out with select=")
        base = tensor.content.layout.tensors[tensor.leaf.index]
        first, last = start // base.item_bytes, -(-stop // base.item_bytes)
        memory = new_array(((last - first) * base.item_bytes,), np.dtype(np.uint8))
        at = 0
        for offsets, sizes in row_boxes(base.shape, first, last):
            until = at + prod(sizes) * base.item_bytes
            wanted.append(WantedBox(tensor.leaf.index, BoxBounds(offsets, sizes), target_of(memory[at:until])))
            at = until
        memories.append((memory, form._replace(offset_bytes=form.offset_bytes - first * base.item_bytes)))
    if wanted:
        pieces[0].tensor.content.read_boxes(wanted)
    return [view_of(memory, form).reshape(-1) for memory, form in memories]


def _form_of_piece(piece: Piece) -> LeafForm:
    """A contiguous piece is flat; any other is its whole tensor."""
    form = piece.tensor.form
    if not piece.tensor.is_contiguous:
        return form
    return LeafForm(form.dtype, (piece.last - piece.first,), (1,), form.offset_bytes + piece.first * form.dtype.itemsize)


@cache
def has_numbers(dtype: AnyDtype) -> bool:
    """Whether an element is one number: not text, not a time, not bits that hold several numbers or need a scale stored elsewhere."""
    if isinstance(dtype, np.dtype):
        return dtype.kind in "biufc"
    try:
        _as_float64(torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype))
    except RuntimeError:  # torch cannot read it either: int4, bits8, float4_e2m1fn_x2
        return False
    return True


def steps(*flat: TensorOrArray) -> Iterator[tuple[Numbers, ...]]:
    """The elements of flat tensors of one length, some at a time, as float64, or complex128."""
    for start in range(0, len(flat[0]), STEP_ELEMENTS):
        yield tuple(_as_float64(elements[start : start + STEP_ELEMENTS]) for elements in flat)


def _as_float64(elements: TensorOrArray) -> Numbers:
    if isinstance(elements, torch.Tensor):
        numbers: Numbers = elements.to(torch.complex128 if elements.is_complex() else torch.float64).numpy()
        return numbers
    with np.errstate(over="ignore"):  # a long double may be larger
        return elements.astype(np.complex128 if elements.dtype.kind == "c" else np.float64, copy=False)


def same_bits(one: TensorOrArray, two: TensorOrArray) -> bool:
    """Whether two flat tensors have one dtype and the same bytes."""
    return one.dtype == two.dtype and np.array_equal(_bytes_of(one), _bytes_of(two))


def _bytes_of(flat: TensorOrArray) -> Array:
    return flat.contiguous().view(torch.uint8).numpy() if isinstance(flat, torch.Tensor) else np.ascontiguousarray(flat).view(np.uint8)
