"""A stored state whose tensors have addresses but no bytes: what torch and DCP need to lay out files that are filled later.

Memory that is never touched costs nothing, so a state of any size is built this way. What has to be pickled by value (numpy arrays, and
whatever `by_value` names) is read for real. Knows no file.
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
from tensorstore_ck.state.allocate import Found, TensorAllocator, form_of
from tensorstore_ck.state.byte_sources import address_of
from tensorstore_ck.state.rebuild_tree import NOTHING, build, require_buildable


@contextmanager
def untouched() -> Iterator[None]:
    """New tensors get memory as it comes: where algorithms are to be deterministic, torch fills it, and then it takes room."""
    switch: Any = torch.utils.deterministic
    fills, switch.fill_uninitialized_memory = switch.fill_uninitialized_memory, False
    try:
        yield
    finally:
        switch.fill_uninitialized_memory = fills


class MetaState:
    """A state, and which stored tensor each address stands for."""

    def __init__(self, content: SnapshotContent, tree: Tree, by_value: frozenset[str]) -> None:
        """`by_value`: tags of containers, all of whose tensors are read for real.

        Raises:
            UnsupportedValueError: a type in it cannot be made here.
        """
        require_buildable(tree, content)
        layout, cpu = content.layout, torch.device("cpu")
        real, hollow = set[int](), list[Leaf]()
        read: list[Leaf] = []
        for leaf, inside in _leaves(tree, by_value, inside=False):
            if inside or isinstance(form_of(layout, leaf).dtype, np.dtype):
                real.add(id(leaf))
                read.append(leaf)
            else:
                hollow.append(leaf)
        filled = TensorAllocator(layout, [(leaf, None) for leaf in read], cpu)
        content.read(dict(filled.targets))
        try:
            with untouched():
                empty = TensorAllocator(layout, [(leaf, None) for leaf in hollow], cpu)
        except RuntimeError as exc:
            raise NoSpaceError(
                f"this host gives no addresses for a state of that size ({str(exc).splitlines()[0]}): allow more with vm.overcommit_memory "
                "or `ulimit -v`, or export as safetensors, which needs none",
                object_id="memory",
            ) from exc
        self.tensors: dict[int, tuple[torch.Tensor, Leaf]] = {}
        """id -> a tensor without bytes, and its leaf; of several leaves that are one tensor, any."""

        def tensor_of(leaf: Leaf) -> Found:
            if id(leaf) in real:
                return filled.get(leaf)
            found = empty.get(leaf)
            assert isinstance(found, torch.Tensor)
            self.tensors[id(found)] = found, leaf
            return found

        self.state: Any = build(tree, content, tensor_of)
        self._keep = empty
        self._numbers = sorted(
            (address_of(np.frombuffer(memory, np.uint8)), number)
            for number, target in empty.targets.items()
            if (memory := target.memory()) is not None
        )

    def stored_in(self, storage: torch.UntypedStorage) -> list[tuple[int, int]]:
        """(number, offset) of the stored tensors in a storage; none if it has its bytes already."""
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        first = bisect_right(self._numbers, (start, -1))
        found = []
        for address, number in self._numbers[first:]:
            if address >= stop:
                break
            found.append((number, address - start))
        return found

    def require_one_dtype(self) -> None:
        """Refuses tensors that see the same memory as different dtypes, which torch cannot save.

        Raises:
            UnsupportedValueError: it names two of them.
        """
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
    """The tensors, and whether one of these containers is around them."""
    if isinstance(tree, Leaf):
        if tree.kind != "value" and tree is not NOTHING:
            yield tree, inside
        return
    inside = inside or tree.node[0] in by_value
    for child in [*tree.children, *([tree.attributes] if tree.attributes is not None else [])]:
        yield from _leaves(child, by_value, inside=inside)
