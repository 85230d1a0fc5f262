"""A stored state as a mapping of names to tensors, read when they are used. Thread-safe as far as its `SnapshotContent` is."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from math import prod
from types import EllipsisType
from typing import Any, Self

import numpy as np
import torch

from tensorstore_ck.common.html_table import GLANCE_ROWS, html_table
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.format.tree import Leaf, leaves, parse
from tensorstore_ck.format.values import decode
from tensorstore_ck.state.allocate import LeafForm, byte_range, form_of, view_of
from tensorstore_ck.state.byte_sources import new_tensor
from tensorstore_ck.state.memory_order import in_order
from tensorstore_ck.state.registered_types import decode_torch

Index = int | slice | EllipsisType | None | torch.Tensor | tuple[Any, ...]


class NoSuchTensorError(NotFoundError, KeyError):
    """The snapshot has no tensor of that name."""

    __str__ = Exception.__str__


class BadIndexError(InvalidOptionError, IndexError):
    """An index that does not fit a tensor."""


@short_errors
class LazyTensor:
    """One stored tensor or array: ``t[10:20]`` reads only the blocks that hold these rows; ``t[:]`` reads it all."""

    def __init__(self, content: SnapshotContent, leaf: Leaf, require_open: Callable[[], object]) -> None:
        self._content = content
        self._leaf = leaf
        self._require_open = require_open
        self._form = form_of(content.layout, leaf)

    @property
    def name(self) -> str:
        """Its path in the state."""
        return self._leaf.path

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return torch.Size(self._form.shape)

    @property
    def dtype(self) -> torch.dtype | np.dtype[Any]:
        """The torch dtype, or the numpy dtype of an array."""
        return self._form.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return prod(self._form.shape) * self._form.dtype.itemsize

    def __len__(self) -> int:
        if not self._form.shape:
            raise BadIndexError(f"{self.name!r} has no dimensions, so no length", object_id=self.name)
        return self._form.shape[0]

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, shape={list(self.shape)}, dtype={self.dtype})"

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, index: Index) -> Any:
        """A tensor (or array) of the elements that `index` picks, as torch (or numpy) would.

        Only leading integers and the first slice narrow what is read; anything else is applied to the rows that were read.

        Raises:
            BadIndexError: `index` does not fit.
        """
        self._require_open()
        items = index if isinstance(index, tuple) else (index,)
        form, rest = self._narrow(list(items))
        elements = self._read(form)
        try:
            return elements[tuple(rest)] if rest else elements
        except (IndexError, ValueError, TypeError) as exc:
            raise BadIndexError(f"{index!r} does not fit {self!r}: {exc}", object_id=self.name) from exc

    def _narrow(self, items: list[Any]) -> tuple[LeafForm, list[Any]]:
        """The box to read, and the rest of the index, to apply to it."""
        form = self._form
        while items and form.shape:
            first = items[0]
            extent, step_bytes = form.shape[0], form.strides[0] * form.dtype.itemsize
            if hasattr(first, "__index__") and not isinstance(first, bool | np.bool_ | torch.Tensor | np.ndarray):
                row = first.__index__()
                if not -extent <= row < extent:
                    raise BadIndexError(f"row {row} is not in {self!r}", object_id=self.name)
                offset = form.offset_bytes + row % extent * step_bytes
                form = LeafForm(form.dtype, form.shape[1:], form.strides[1:], offset)
                del items[0]
                continue
            if isinstance(first, slice):
                try:
                    rows = range(*first.indices(extent))
                except (TypeError, ValueError) as exc:
                    raise BadIndexError(f"{first!r} does not fit {self!r}: {exc}", object_id=self.name) from exc
                start, stop = (min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1) if rows else (0, 0)
                form = LeafForm(form.dtype, (stop - start, *form.shape[1:]), form.strides, form.offset_bytes + start * step_bytes)
                items[0] = slice(None, None, rows.step)  # numpy accepts a negative step, torch does not
            break
        return form, items

    def _read(self, form: LeafForm) -> Any:
        """Reads the bytes between the first and the last element, and views them with the form's strides."""
        if 0 in form.shape:
            dtype, cpu = form.dtype, torch.device("cpu")
            return new_tensor(form.shape, dtype, cpu) if isinstance(dtype, torch.dtype) else np.empty(form.shape, dtype)
        start, stop = byte_range(form)
        data = self._content.read_range(self._leaf.index, start, stop)
        elements = view_of(torch.frombuffer(data, dtype=torch.uint8), form._replace(offset_bytes=form.offset_bytes - start))
        order = self._content.layout.tensors[self._leaf.index].order if self._leaf.kind == "tensor" else ()
        gone = len(order) - len(form.shape)  # leading dims, by an integer each
        return in_order(elements, tuple(dim - gone for dim in order if dim >= gone)) if order else elements


@short_errors
class LazySnapshot(Mapping[str, LazyTensor]):
    """The tensors of a snapshot by name; a tensor is read when it is indexed."""

    def __init__(self, content: SnapshotContent, require_open: Callable[[], object] = lambda: None) -> None:
        """`require_open` raises if the store was closed."""
        self._content = content
        self._require_open = require_open
        self._tree = parse(content.layout, len(content.values))
        self._leaves = {leaf.path: leaf for leaf in leaves(self._tree)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __repr__(self) -> str:
        return f"LazySnapshot({len(self):,} tensors)"

    def _repr_html_(self) -> str:
        total_bytes = sum(tensor.nbytes for tensor in self.values())
        rows = (
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), human_bytes(tensor.nbytes))
            for name, tensor in self.items()
        )
        return html_table(f"{self!r}, {human_bytes(total_bytes)}", ("name", "dtype", "shape", "size"), rows, GLANCE_ROWS)

    def __getitem__(self, name: str) -> LazyTensor:
        leaf = self._leaves.get(name)
        if leaf is None or leaf.kind == "value":
            there = "a plain value: see .state_values" if leaf is not None else "not in the snapshot; see .names()"
            raise NoSuchTensorError(f"{name!r} is {there}", object_id=str(name))
        return LazyTensor(self._content, leaf, self._require_open)

    def __iter__(self) -> Iterator[str]:
        return (path for path, leaf in self._leaves.items() if leaf.kind != "value")

    def __len__(self) -> int:
        return sum(leaf.kind != "value" for leaf in self._leaves.values())

    def names(self) -> list[str]:
        """The names of all tensors, in the state's order."""
        return list(self)

    @cached_property
    def state_values(self) -> dict[str, Any]:
        """Path -> value, for everything that is not a tensor."""
        self._require_open()
        content = self._content
        return {
            path: decode(content.values[leaf.index], decode_other=decode_torch, blob=content.blob, name=path)
            for path, leaf in self._leaves.items()
            if leaf.kind == "value"
        }
