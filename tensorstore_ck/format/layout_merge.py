"""Unites the states of ranks that had several layouts, such as the stages of a pipeline: dicts of equal paths become one. Pure.

A tensor that several sides have under one name is one tensor, and so is a value. Whether the tensors' bytes are equal is not known here.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from tensorstore_ck.errors import MismatchError
from tensorstore_ck.format.layout import Layout, Node, SharedStorage
from tensorstore_ck.format.tree import Branch, Leaf, Tree, parse

_DICTS: Final = ("d", "o")
_TYPED: Final = ("r", "n", "f")


class LayoutPart(Protocol):
    """What the ranks with one layout put."""

    @property
    def name(self) -> str:
        """Of one of its parts, for messages."""

    @property
    def layout(self) -> Layout:
        """Its layout."""

    @property
    def values(self) -> Sequence[Any]:
        """The value of each hole."""

    def blob(self, index: int) -> bytes:
        """The verified bytes of a large value."""


class LayoutConflictError(Exception):
    """Two sides have different things at one path. Never leaves this package."""

    def __init__(self, path: str, one: int, other: int) -> None:
        super().__init__(path, one, other)
        self.path = path
        self.sides = (one, other)


class MergedLayout:
    """The united state. Values and tensors are numbered in its own order."""

    def __init__(self, sides: Sequence[LayoutPart]) -> None:
        """Raises:
        ContradictionError: the sides have different containers or tensors at one path.
        """
        self._sides = sides
        self._number_of: dict[str, int] = {}
        self._members: list[set[tuple[int, int]]] = []
        """Of each tensor: where it is on all sides that have it."""
        self._values: list[Any] = []
        self.differing: list[LayoutConflictError] = []
        """Values that are not equal on all sides."""
        self.blobs: list[tuple[int, int]] = []
        """Where each large value is: (side, its number there)."""
        self.places: list[tuple[int, int]] = []
        """Where each tensor is, on the first side that has it."""
        self.shared: dict[int, list[tuple[int, int]]] = {}
        """Where each tensor is that several sides have."""
        self.numbered: list[LayoutConflictError] = []
        """Tensors that several sides have under a number instead of a name: those of an optimizer's state, most likely."""
        trees = [parse(side.layout, len(side.values), f"the layout of {side.name}") for side in sides]
        tree = self._node(list(enumerate(trees)), is_numbered=False)
        tensors = [sides[side].layout.tensors[number] for side, number in self.places]
        self.layout = Layout(tensors, tree, self._storages())

    @property
    def values(self) -> Sequence[Any]:
        """The value of each hole; to ask for one that is not equal on all sides is an error."""
        return _Values(self._values) if self.differing else self._values

    def _node(self, trees: Sequence[tuple[int, Tree]], *, is_numbered: bool) -> Node:
        """The node of what lies at one path on some of the sides."""
        side, first = trees[0]
        if isinstance(first, Leaf):
            return self._leaf(trees, side, first, is_numbered=is_numbered)
        branches: list[tuple[int, Branch]] = []
        for number, tree in trees:
            if (
                not isinstance(tree, Branch)
                or tree.node[0] != first.node[0]
                or (tree.node[0] in _TYPED and tree.node[1] != first.node[1])
                or (tree.node[0] not in _DICTS and str(tree.keys) != str(first.keys))
            ):
                raise LayoutConflictError(first.path, side, number)
            branches.append((number, tree))
        children: dict[str, list[tuple[int, Tree]]] = {}
        keys: dict[str, Any] = {}
        for number, branch in branches:
            for at, child in enumerate(branch.children):
                key = branch.keys[at] if branch.keys else at
                keys.setdefault(repr(key), key)
                children.setdefault(repr(key), []).append((number, child))
        tag, *rest = first.node
        numbers = {text for text, key in keys.items() if tag in _DICTS and type(key) is int}
        nodes = [self._node(several, is_numbered=is_numbered or text in numbers) for text, several in children.items()]
        if tag in ("l", "u"):
            return [tag, nodes]
        if tag == "r":
            return [tag, rest[0], nodes[0]]
        if tag in ("n", "f"):
            return [tag, rest[0], list(keys.values()), nodes]
        if tag != "o":
            return [tag, list(keys.values()), nodes]
        attributes = [(number, branch.attributes) for number, branch in branches if branch.attributes is not None]
        return [tag, list(keys.values()), nodes, self._node(attributes, is_numbered=is_numbered) if attributes else False]

    def _leaf(self, trees: Sequence[tuple[int, Tree]], side: int, first: Leaf, *, is_numbered: bool) -> Node:
        others: list[tuple[int, Leaf]] = []
        for number, other in trees[1:]:
            if not isinstance(other, Leaf) or other.kind != first.kind:
                raise LayoutConflictError(first.path, side, number)
            others.append((number, other))
        if first.kind == "value":
            self._add_value(side, first, others)
            return None
        for number, other in others:
            if not self._is_same_tensor(side, first, number, other):
                raise LayoutConflictError(first.path, side, number)
        if is_numbered and others:
            self.numbered.append(LayoutConflictError(first.path, side, others[0][0]))
        name = self._sides[side].layout.tensors[first.index].name
        tensor = self._number_of.setdefault(name, len(self.places))
        every = [(side, first.index), *((number, other.index) for number, other in others)]
        if tensor == len(self.places):
            self.places.append((side, first.index))
            self._members.append(set())
        elif self._members[tensor].isdisjoint(every):  # the keys "a.b", and "a" over "b", have one path
            raise LayoutConflictError(first.path, self.places[tensor][0], side)
        self._members[tensor].update(every)
        if others:
            known = self.shared.setdefault(tensor, [])
            known += [place for place in ((side, first.index), *((number, other.index) for number, other in others)) if place not in known]
        return tensor if type(first.node) is int else [first.node[0], tensor, *first.node[2:]]

    def _add_value(self, side: int, first: Leaf, others: Sequence[tuple[int, Leaf]]) -> None:
        value = self._sides[side].values[first.index]
        different = next((number for number, other in others if not self._is_same_value(side, first, number, other)), None)
        if different is not None:
            self.differing.append(LayoutConflictError(first.path, side, different))
            value = self.differing[-1]
        elif _is_large(value):
            self.blobs.append((side, value[2]))
            value = ["b", value[1], len(self.blobs) - 1]
        self._values.append(value)

    def _is_same_value(self, side: int, leaf: Leaf, other_side: int, other: Leaf) -> bool:
        one, two = self._sides[side], self._sides[other_side]
        a, b = one.values[leaf.index], two.values[other.index]
        if _is_large(a) and _is_large(b):
            return a[:2] == b[:2] and one.blob(a[2]) == two.blob(b[2])
        return repr(a) == repr(b)  # 1, True and 1.0 are equal, and NaN is not itself

    def _is_same_tensor(self, side: int, leaf: Leaf, other_side: int, other: Leaf) -> bool:
        specs = [self._sides[side].layout.tensors[leaf.index], self._sides[other_side].layout.tensors[other.index]]
        details = [each.node[2:] if type(each.node) is list else [0] for each in (leaf, other)]
        return specs[0] == specs[1] and details[0] == details[1]

    def _storages(self) -> list[SharedStorage]:
        """The allocations of which all tensors are there."""
        number_of = {place: number for number, place in enumerate(self.places)}
        return [
            storage._replace(tensors=tuple(number_of[side, tensor] for tensor in storage.tensors))
            for side, each in enumerate(self._sides)
            for storage in each.layout.storages
            if all((side, tensor) in number_of for tensor in storage.tensors)
        ]


class _Values(Sequence[Any]):
    """Values, some of which cannot be told."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        value = self._values[index]
        if isinstance(value, LayoutConflictError):
            raise MismatchError(
                f"the ranks that put this snapshot had different values of {value.path!r}; leave it out with select= or rename=, "
                "and put what is a rank's alone into rank_state=",
                object_id=value.path,
            )
        return value


def _is_large(value: object) -> bool:
    return type(value) is list and bool(value) and value[0] == "b"
