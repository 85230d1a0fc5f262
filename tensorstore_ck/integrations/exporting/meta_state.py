"""A stored state whose tensors have addresses but no bytes, from which torch and DCP lay out files that are filled later.

Memory that is never touched costs nothing, so this works for states of any size. Objects that must be pickled by value (numpy arrays, and
the containers in `by_value`) are read. Knows no file.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic

from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import NoSpaceError, UnsupportedValueError
from tensorstore_ck.format.tree import Leaf, Tree
from tensorstore_ck.state.allocate import TensorAllocator, TensorOrArray, form_of
from tensorstore_ck.state.rebuild_tree import UNSELECTED, build, require_buildable


@contextmanager
def untouched() -> Iterator[None]:
    """Keeps torch from filling new tensors, as it does for deterministic algorithms, which would use real memory."""
    switch: Any = torch.utils.deterministic
    fills, switch.fill_uninitialized_memory = switch.fill_uninitialized_memory, False
    try:
        yield
    finally:
        switch.fill_uninitialized_memory = fills


class MetaState:
    """A state, and the stored tensor for each address."""

    def __init__(self, content: SnapshotContent, tree: Tree, by_value: frozenset[str]) -> None:
        """`by_value`: tags of containers whose tensors are all read. Raises `UnsupportedValueError` for types that cannot be made here."""
        require_buildable(tree, content)
        layout, cpu = content.layout, torch.device("cpu")
        read, unread = list[Leaf](), list[Leaf]()
        for leaf, inside in _leaves(tree, by_value, inside=False):
            is_read = inside or isinstance(form_of(layout, leaf).dtype, np.dtype)
            (read if is_read else unread).append(leaf)
        real = {id(leaf) for leaf in read}
        filled = TensorAllocator(layout, [(leaf, None) for leaf in read], cpu)
        content.read(filled.targets)
        try:
            with untouched():
                empty = TensorAllocator(layout, [(leaf, None) for leaf in unread], cpu)
        except RuntimeError as exc:
            raise NoSpaceError(
                f"this host has too little address space for the state ({str(exc).splitlines()[0]}): allow more with vm.overcommit_memory "
                "or `ulimit -v`, or export as safetensors, which needs none",
                object_id="memory",
            ) from exc
        self.tensors: dict[int, tuple[torch.Tensor, Leaf]] = {}
        """id -> a tensor without bytes, and one of its leaves."""

        def tensor_of(leaf: Leaf) -> TensorOrArray:
            if id(leaf) in real:
                return filled.get(leaf)
            tensor = empty.get(leaf)
            assert isinstance(tensor, torch.Tensor)
            self.tensors[id(tensor)] = tensor, leaf
            return tensor

        self.state: Any = build(tree, content, tensor_of)
        self._keep = empty
        self._numbers = sorted((address, number) for number, address in empty.addresses().items())

    def stored_in(self, storage: torch.UntypedStorage) -> list[tuple[int, int]]:
        """(number, offset) of the stored tensors in a storage; empty if it has its bytes."""
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        first = bisect_right(self._numbers, (start, -1))
        stored = []
        for address, number in self._numbers[first:]:
            if address >= stop:
                break
            stored.append((number, address - start))
        return stored

    def require_one_dtype(self) -> None:
        """Raises `UnsupportedValueError` if tensors share memory with different dtypes, which torch cannot save; it names two of them."""
        seen: dict[int, tuple[torch.dtype, str]] = {}
        for tensor, leaf in self.tensors.values():
            address = tensor.untyped_storage().data_ptr()
            dtype, first = seen.setdefault(address, (tensor.dtype, leaf.path))
            if dtype != tensor.dtype and address:
                raise UnsupportedValueError(
                    f"{first!r} and {leaf.path!r} share memory as {dtype} and {tensor.dtype}, which torch.save cannot hold: leave one out "
                    "with --exclude (exclude=), or export as safetensors or dcp, which give each its own copy",
                    object_id=leaf.path,
                )


def _leaves(tree: Tree, by_value: frozenset[str], *, inside: bool) -> Iterator[tuple[Leaf, bool]]:
    """The tensors, and whether each is inside one of these containers."""
    if isinstance(tree, Leaf):
        if tree.kind != "value" and tree is not UNSELECTED:
            yield tree, inside
        return
    inside = inside or tree.node[0] in by_value
    for child in [*tree.children, *([tree.attributes] if tree.attributes is not None else [])]:
        yield from _leaves(child, by_value, inside=inside)
