"""Merges the layouts of ranks whose states differ, such as pipeline stages: dicts with equal paths become one dict. Pure.

A tensor or value that several layouts have under one name becomes one. This file compares values, but not the bytes of tensors.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from tensorstore_ck.errors import MismatchError
from tensorstore_ck.format.layout import Layout, Node, SharedStorage
from tensorstore_ck.format.tree import Container, Leaf, Tree, parse

_DICTS: Final = ("d", "o")
_TYPED: Final = ("r", "n", "f")


class LayoutPart(Protocol):
    """The state of the ranks that share one layout."""

    @property
    def name(self) -> str:
        """The name of one of these ranks' parts, for messages."""

    @property
    def layout(self) -> Layout:
        """The layout."""

    @property
    def values(self) -> Sequence[Any]:
        """The value of each hole."""

    def blob(self, index: int) -> bytes:
        """The verified bytes of a large value."""


class LayoutConflictError(Exception):
    """Two parts differ at one path. Callers turn it into a public error."""

    def __init__(self, path: str, one: int, other: int) -> None:
        super().__init__(path, one, other)
        self.path = path
        self.parts = (one, other)


class MergedLayout:
    """The merged state, with its own numbers of values and tensors."""

    def __init__(self, parts: Sequence[LayoutPart]) -> None:
        """Raises:
        LayoutConflictError: the parts have different containers or tensors at one path.
        """
        self._parts = parts
        self._number_of: dict[str, int] = {}
        self._members: list[set[tuple[int, int]]] = []
        """Each tensor's (part, number) in all parts that have it."""
        self._values: list[Any] = []
        self.value_conflicts: list[LayoutConflictError] = []
        """Values that differ between parts."""
        self.blob_locations: list[tuple[int, int]] = []
        """Each large value's (part, number)."""
        self.locations: list[tuple[int, int]] = []
        """Each tensor's (part, number) in the first part that has it."""
        self.shared_tensors: dict[int, list[tuple[int, int]]] = {}
        """Every (part, number) of each tensor that several parts have."""
        self.numbered_tensors: list[LayoutConflictError] = []
        """Tensors of optimizers that several parts name by a number, which may stand for another parameter in each part."""
        trees = [parse(part.layout, len(part.values), f"the layout of {part.name}") for part in parts]
        tree = self._node(list(enumerate(trees)), is_numbered=False)
        tensors = [parts[part].layout.tensors[number] for part, number in self.locations]
        self.layout = Layout(tensors, tree, self._storages())

    @property
    def values(self) -> Sequence[Any]:
        """The value of each hole; reading one that differs between parts raises `MismatchError`."""
        return _Values(self._values) if self.value_conflicts else self._values

    def _node(self, trees: Sequence[tuple[int, Tree]], *, is_numbered: bool) -> Node:
        """The merged node of the trees that parts have at one path."""
        part, first = trees[0]
        if isinstance(first, Leaf):
            return self._leaf(trees, part, first, is_numbered=is_numbered)
        containers: list[tuple[int, Container]] = []
        for number, tree in trees:
            if (
                not isinstance(tree, Container)
                or tree.node[0] != first.node[0]
                or (tree.node[0] in _TYPED and tree.node[1] != first.node[1])
                or (tree.node[0] not in _DICTS and str(tree.keys) != str(first.keys))
            ):
                raise LayoutConflictError(first.path, part, number)
            containers.append((number, tree))
        children: dict[str, list[tuple[int, Tree]]] = {}
        keys: dict[str, Any] = {}
        for number, container in containers:
            for at, child in enumerate(container.children):
                key = container.keys[at] if container.keys else at
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
        attributes = [(number, container.attributes) for number, container in containers if container.attributes is not None]
        return [tag, list(keys.values()), nodes, self._node(attributes, is_numbered=is_numbered) if attributes else False]

    def _leaf(self, trees: Sequence[tuple[int, Tree]], part: int, first: Leaf, *, is_numbered: bool) -> Node:
        others: list[tuple[int, Leaf]] = []
        for number, other in trees[1:]:
            if not isinstance(other, Leaf) or other.kind != first.kind:
                raise LayoutConflictError(first.path, part, number)
            others.append((number, other))
        if first.kind == "value":
            self._add_value(part, first, others)
            return None
        for number, other in others:
            if not self._is_same_tensor(part, first, number, other):
                raise LayoutConflictError(first.path, part, number)
        if is_numbered and others:
            self.numbered_tensors.append(LayoutConflictError(first.path, part, others[0][0]))
        name = self._parts[part].layout.tensors[first.index].name
        tensor = self._number_of.setdefault(name, len(self.locations))
        every = [(part, first.index), *((number, other.index) for number, other in others)]
        if tensor == len(self.locations):
            self.locations.append((part, first.index))
            self._members.append(set())
        elif self._members[tensor].isdisjoint(every):  # the key "a.b" and the keys "a", "b" give one path
            raise LayoutConflictError(first.path, self.locations[tensor][0], part)
        self._members[tensor].update(every)
        if others:
            known = self.shared_tensors.setdefault(tensor, [])
            known += [location for location in every if location not in known]
        return tensor if type(first.node) is int else [first.node[0], tensor, *first.node[2:]]

    def _add_value(self, part: int, first: Leaf, others: Sequence[tuple[int, Leaf]]) -> None:
        value = self._parts[part].values[first.index]
        different = next((number for number, other in others if not self._is_same_value(part, first, number, other)), None)
        if different is not None:
            self.value_conflicts.append(LayoutConflictError(first.path, part, different))
            value = self.value_conflicts[-1]
        elif _is_large(value):
            self.blob_locations.append((part, value[2]))
            value = ["b", value[1], len(self.blob_locations) - 1]
        self._values.append(value)

    def _is_same_value(self, part: int, leaf: Leaf, other_part: int, other: Leaf) -> bool:
        one, two = self._parts[part], self._parts[other_part]
        a, b = one.values[leaf.index], two.values[other.index]
        if _is_large(a) and _is_large(b):
            return a[:2] == b[:2] and one.blob(a[2]) == two.blob(b[2])
        return repr(a) == repr(b)  # 1, True and 1.0 are equal, and NaN is not itself

    def _is_same_tensor(self, part: int, leaf: Leaf, other_part: int, other: Leaf) -> bool:
        specs = [self._parts[part].layout.tensors[leaf.index], self._parts[other_part].layout.tensors[other.index]]
        details = [side.node[2:] if type(side.node) is list else [0] for side in (leaf, other)]
        return specs[0] == specs[1] and details[0] == details[1]

    def _storages(self) -> list[SharedStorage]:
        """The allocations whose tensors are all in the merged layout."""
        number_of = {location: number for number, location in enumerate(self.locations)}
        return [
            storage._replace(tensors=tuple(number_of[part, tensor] for tensor in storage.tensors))
            for part, source in enumerate(self._parts)
            for storage in source.layout.storages
            if all((part, tensor) in number_of for tensor in storage.tensors)
        ]


class _Values(Sequence[Any]):
    """Values, some of which have no single answer."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        value = self._values[index]
        if isinstance(value, LayoutConflictError):
            raise MismatchError(
                f"the ranks that saved this snapshot had different values of {value.path!r}; leave it out with select= or rename=, "
                "and save what differs between ranks in rank_state=",
                object_id=value.path,
            )
        return value


def _is_large(value: object) -> bool:
    return type(value) is list and bool(value) and value[0] == "b"
