"""A layout's tree, parsed and checked: containers (`Container`) and leaves (`Leaf`), each with its path.

Pure and free of torch, so that `tsck show` and fsck can walk a state without it. The grammar is in `layout`; anything else raises
`CorruptObjectError`. Paths join keys and positions by ``.``. Leaf paths are unique: capture and parse take names from `LeafNames` in
the same depth-first order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, NoReturn

from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.layout import MAX_DIMS, MAX_NAME_BYTES, MAX_TENSOR_BYTES, Layout, Node
from tensorstore_ck.format.values import MAX_NESTING, key_text

REQUIRES_GRAD: Final = 1
PARAMETER: Final = 2
ROOT: Final = "."
"""The path of a state that is a single leaf."""
SUBTREE_TAG: Final = "tree"
"""The tag of a subtree among the values."""
MAX_PATH: Final = MAX_NAME_BYTES
"""The longest path of a container: no leaf name needs more, and a long key must not be copied to each of many nodes below it."""
LONG_PATH_BYTES: Final = 256
SHORT_PATH: Final = LONG_PATH_BYTES // 4
MAX_LONG_PATHS_BYTES: Final = 64 << 20
"""What the paths of containers may have beyond that, counted once for each child: a key takes its bytes once, but memory for each."""
ATTRIBUTES: Final = "_metadata"
"""The path component of an OrderedDict's attribute."""


@dataclass(slots=True, eq=False)
class Leaf:
    """A value, a tensor, or a view into a tensor's memory."""

    path: str
    kind: Literal["value", "tensor", "view"]
    index: int
    """The value's number, or the tensor's."""
    node: Node

    @property
    def flags(self) -> int:
        """`REQUIRES_GRAD` and `PARAMETER`, of a tensor or view."""
        return self.node[-1] if type(self.node) is list else 0


class Container:
    """A container; ``node[0]`` is its tag."""

    __slots__ = ("attributes", "children", "keys", "node", "path")

    def __init__(self, node: list[Any], path: str, keys: Sequence[Any], children: "list[Tree]", attributes: "Tree | None") -> None:
        self.node = node
        self.path = path
        """Not unique: a leaf or another container may have the same path."""
        self.keys = keys
        """Encoded keys, field names or positions: one for each child; none for a registered type, which has one child."""
        self.children = children
        self.attributes = attributes
        """The ``_metadata`` of an OrderedDict."""


Tree = Container | Leaf


class LeafNames:
    """Makes leaf names: valid UTF-8, bounded length, unique."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}
        self._long_bytes = 0

    def reserve(self, path: str, count: int) -> str:
        """Counts the paths of the `count` children of the container at `path`, before they are made; returns what names need of `path`.

        Nothing to do for a `path` of up to `SHORT_PATH` characters.

        Raises:
            UnsupportedValueError: too many of the paths so far are long.
        """
        size = min(len(path), MAX_PATH) * (1 if path.isascii() else 4)
        if size > LONG_PATH_BYTES:
            self._long_bytes += (size - LONG_PATH_BYTES) * count
            if self._long_bytes > MAX_LONG_PATHS_BYTES:
                message = f"too many values lie below paths of more than {LONG_PATH_BYTES} bytes, such as {path[:80]}...: use shorter keys"
                raise UnsupportedValueError(message, object_id=path[:80])
        return path[:MAX_PATH]

    def name(self, path: str) -> str:
        """`path`, shortened if it is too long, with a suffix ``#2``, ``#3`` ... if it is taken."""
        if len(path) > MAX_NAME_BYTES // 8 or not path.isascii():
            encoded = path.encode("utf-8", "backslashreplace")
            is_long = len(encoded) > MAX_NAME_BYTES - 32
            path = encoded[: MAX_NAME_BYTES - 32].decode(errors="ignore") + "..." if is_long else encoded.decode()
        taken = self._taken
        if path not in taken:
            taken[path] = 1
            return path
        while (name := f"{path}#{(again := taken[path] + 1)}") in taken:
            taken[path] = again
        taken[path] = again
        taken[name] = 1
        return name

    def at(self, path: str) -> str:
        """`name` of the leaf at `path`, which ends with a dot, or is empty at the root."""
        path = path[:-1] if path else ROOT
        if path in self._taken or len(path) > MAX_NAME_BYTES // 8 or not path.isascii():
            return self.name(path)
        self._taken[path] = 1  # nearly always
        return path

    def names(self, paths: Sequence[str]) -> Sequence[str]:
        """`name` of each path, in order; fast if no path needs a change."""
        unique, taken = dict.fromkeys(paths, 1), self._taken
        is_new = len(unique) == len(paths) and (not taken or taken.keys().isdisjoint(unique.keys()))
        if not is_new or max(map(len, paths), default=0) > MAX_NAME_BYTES - 32 or not "".join(paths).isascii():
            return [self.name(path) for path in paths]
        if taken:
            taken.update(unique)
        else:
            self._taken = unique
        return paths


def parse(layout: Layout, value_count: int, object_id: str = "the layout") -> Tree:
    """The checked tree of `layout`, whose part has `value_count` values.

    Raises:
        CorruptObjectError: the tree does not follow the grammar, or does not fit the tensors and values.
    """
    parser = _Parser(len(layout.tensors), object_id)
    try:
        tree = parser.tree(layout.tree, "", 0)
    except UnsupportedValueError as exc:
        parser.fail(str(exc))
    if parser.holes != value_count:
        parser.fail(f"{parser.holes} holes for {value_count} values")
    return tree


class Expanded(NamedTuple):
    """A tree whose holes were replaced by their subtrees."""

    node: Node
    values: Sequence[Any]
    subtrees: frozenset[int]
    """The ids of the nodes that were subtrees."""


def expand(node: Node, values: Sequence[Any], object_id: str = "the layout") -> Expanded:
    """Replaces the holes of `node` whose values are subtrees (``["tree", node, values]``) by these subtrees.

    Raises:
        CorruptObjectError: there are fewer values than holes, or a subtree has tensors.
    """
    if not any(type(value) is list and value and value[0] == SUBTREE_TAG for value in values):
        return Expanded(node, values, frozenset())
    kept: list[Any] = []
    subtrees: set[int] = set()

    def fill(node: Node, holes: Iterator[Any], *, is_inner: bool) -> Node:
        if node is None:
            value = next(holes)
            if not is_inner and type(value) is list and value and value[0] == SUBTREE_TAG:
                _, inner, inner_values = value
                rest = iter(inner_values)
                filled = fill(inner, rest, is_inner=True)
                if list(rest):
                    raise ValueError("a subtree has more values than holes")
                subtrees.add(id(filled))
                return filled
            kept.append(value)
            return None
        if type(node) is not list or node[0] in ("t", "w"):
            if is_inner:
                raise ValueError("a subtree has a tensor")
            return node
        tag, *rest = node
        at = 1 if tag in ("l", "u") else 3 if tag in ("f", "n") else 2
        filled = list(node)
        filled[at] = (
            fill(node[at], holes, is_inner=is_inner) if tag == "r" else [fill(child, holes, is_inner=is_inner) for child in node[at]]
        )
        if tag == "o" and node[3] is not False:
            filled[3] = fill(node[3], holes, is_inner=is_inner)
        return filled

    holes = iter(values)
    try:
        filled = fill(node, holes, is_inner=False)
    except (StopIteration, TypeError, ValueError, IndexError) as exc:
        raise CorruptObjectError(f"{object_id} has a malformed subtree: {exc!r}; run `tsck fsck`", object_id=object_id) from exc
    return Expanded(filled, [*kept, *holes], frozenset(subtrees))


def leaves(tree: Tree) -> Iterator[Leaf]:
    """Every leaf, depth-first: the order of the holes."""
    pending = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, Leaf):
            yield item
            continue
        if item.attributes is not None:
            pending.append(item.attributes)
        pending.extend(reversed(item.children))


class _Parser:
    def __init__(self, tensor_count: int, object_id: str) -> None:
        self.holes = 0
        self._tensor_count = tensor_count
        self._object_id = object_id
        self._names = LeafNames()
        self._name_at = self._names.at

    def fail(self, what: str) -> NoReturn:
        raise CorruptObjectError(f"{self._object_id} has a malformed tree: {what}; run `tsck fsck`", object_id=self._object_id)

    def tree(self, node: Node, path: str, depth: int) -> Tree:
        """`path` ends with a dot, or is empty."""
        if node is None:
            self.holes += 1
            return Leaf(self._name_at(path), "value", self.holes - 1, node)
        if type(node) is int:
            if not 0 <= node < self._tensor_count:
                self.fail(f"no tensor {node}")
            return Leaf(self._name_at(path), "tensor", node, node)
        if type(node) is not list or not node:
            self.fail(f"a {type(node).__name__} is not a node")
        if node[0] == "t" or node[0] == "w":
            return self._tensor(node, path)
        if depth >= MAX_NESTING:
            self.fail(f"nested deeper than {MAX_NESTING}")
        return self._container_node(node, path, depth + 1)

    def _tensor(self, node: list[Any], path: str) -> Leaf:
        is_view = node[0] == "w"
        if len(node) != (7 if is_view else 3) or not 0 <= self._int(node[1]) < self._tensor_count or not 0 <= self._int(node[-1]) <= 3:
            self.fail(f"tensor node {str(node)[:80]}")
        if is_view:
            _, _, dtype, shape, strides, offset, _ = node
            if type(dtype) is not str or type(shape) is not list or type(strides) is not list or not len(shape) == len(strides) <= MAX_DIMS:
                self.fail(f"view node {str(node)[:80]}")
            if min(map(self._int, [offset, *shape])) < 0 or max(map(abs, map(self._int, [offset, *shape, *strides]))) > MAX_TENSOR_BYTES:
                self.fail(f"view node {str(node)[:80]}")
        return Leaf(self._name_at(path), "view" if is_view else "tensor", node[1], node)

    def _container_node(self, node: list[Any], path: str, depth: int) -> Container:
        tag, *rest = node
        match tag, rest:
            case (("d" | "c"), [list(keys), list(nodes)]):
                pass
            case "o", [list(keys), list(nodes), _]:
                pass
            case "f", [(None | str()), list(keys), list(nodes)]:
                pass
            case (("l" | "u"), [list(nodes)]):
                keys = list(range(len(nodes)))
            case "n", [str(), list(keys), list(nodes)]:
                if not all(type(key) is str for key in keys):
                    self.fail("a field is not a name")
            case "r", [str(), inner]:
                return Container(node=node, path=path[:-1], keys=(), children=[self.tree(inner, path, depth)], attributes=None)
            case _:
                self.fail(f"container node {str(node)[:80]}")
        if len(keys) != len(nodes):
            self.fail(f"{len(keys)} keys for {len(nodes)} nodes")
        path = path if len(path) <= SHORT_PATH else self._names.reserve(path, len(nodes))
        children = []
        for key, child in zip(keys, nodes, strict=True):
            text = key if type(key) is str else key_text(key)
            children.append(self.tree(child, f"{path}{text[:MAX_PATH]}.", depth))
        attributes = None
        if tag == "o" and rest[2] is not False:
            attributes = self.tree(rest[2], f"{path}{ATTRIBUTES}.", depth)
        return Container(node=node, path=path[:-1], keys=keys, children=children, attributes=attributes)

    def _int(self, value: object) -> int:
        if type(value) is not int:
            self.fail(f"{str(value)[:80]} is not an integer")
        return value
