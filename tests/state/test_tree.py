"""Parsing a layout's tree: the same paths as capture, and nothing but our errors for anything else."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.layout import MAX_NAME_BYTES, Layout, Node, TensorSpec
from tensorstore_ck.format.tree import Leaf, LeafNames, leaves, parse
from tensorstore_ck.format.values import MAX_NESTING
from tensorstore_ck.state import restore
from tests.state.fake import stored

SPECS = [TensorSpec("a", "float32", 4, (2, 3)), TensorSpec("b", "np:<i8", 8, (4,))]


class Content:
    """Two tensors of zeros."""

    def __init__(self, layout: Layout, values: list[Any]) -> None:
        self.layout = layout
        self.values = values

    def blob(self, index: int) -> bytes:
        return b""

    def read(self, targets: Mapping[int, Any]) -> None:
        for number, target in targets.items():
            target.write(0, memoryview(bytes(SPECS[number].size_bytes)))

    def read_boxes(self, wanted: object) -> None:
        pass

    def read_range(self, tensor: int, start: int, stop: int) -> bytearray:
        return bytearray(stop - start)


def paths(tree: Node, values: int = 0) -> list[str]:
    return [leaf.path for leaf in leaves(parse(Layout(SPECS, tree), values))]


def test_paths_join_keys_and_positions() -> None:
    tree = ["d", ["m", 3, None, True, ["u", [1, "x"]]], [["l", [0, ["t", 1, 0]]], None, None, None, ["n", "m:C", ["f"], [None]]]]
    assert paths(tree, 4) == ["m.0", "m.1", "3", "None", "True", "(1, x).f"]


def test_a_state_may_be_a_single_leaf() -> None:
    assert paths(0) == paths(["r", "name", 0]) == ["."]


def test_equal_paths_are_distinguished() -> None:
    tree = ["d", ["a", 1, "1", "a.b"], [["d", ["b"], [None]], None, None, None]]
    assert paths(tree, 4) == ["a.b", "1", "1#2", "a.b#2"]


def test_capture_and_parse_name_alike() -> None:
    import torch

    state = {"a": {"b": torch.ones(1), "": 1}, "a.b": torch.ones(2), 1: torch.ones(3), "1": []}
    state |= {"x" * 5000: torch.ones(4), "é\ud800": torch.ones(5)}
    content = stored(state)
    found = [leaf for leaf in leaves(parse(content.layout, len(content.values))) if leaf.kind == "tensor"]
    assert [leaf.path for leaf in found] == [spec.name for spec in content.layout.tensors]


long_texts = st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=3), st.integers(300, 600))


@given(st.lists(st.text("aé\ud800", max_size=2) | st.just("x" * 1000) | long_texts, max_size=8), st.integers(0, 9))
def test_names_are_unique_short_and_encodable_and_those_of_many_are_those_of_each(texts: list[str], split: int) -> None:
    one, many = LeafNames(), LeafNames()
    given_out = [one.name(text) for text in texts]
    assert len(set(given_out)) == len(given_out)
    assert all(len(name.encode()) <= MAX_NAME_BYTES for name in given_out)
    assert [*many.names(texts[:split]), *many.names(texts[split:])] == given_out


def test_many_equal_names_are_cheap() -> None:
    names = LeafNames()
    assert [names.name("x") for _ in range(50_000)][-1] == "x#50000"


def nested(depth: int) -> Node:
    tree: Node = None
    for _ in range(depth):
        tree = ["l", [tree]]
    return tree


def test_depth_is_bounded() -> None:
    assert paths(nested(MAX_NESTING), 1) == [".".join(["0"] * MAX_NESTING)]
    for depth in (MAX_NESTING + 1, 10_000):
        with pytest.raises(CorruptObjectError, match="nested deeper"):
            paths(nested(depth), 1)


MALFORMED: list[Node] = [
    "x",
    1.5,
    True,
    -1,
    2,
    [],
    ["q", []],
    [1, 2],
    ["t"],
    ["t", 0],
    ["t", 2, 0],
    ["t", 0, 4],
    ["t", 0, -1],
    ["t", True, 0],
    ["t", 0, 0, 0],
    ["w", 0, "float32", [1], [1], 0],
    ["w", 9, "float32", [1], [1], 0, 0],
    ["w", 0, 7, [1], [1], 0, 0],
    ["w", 0, "float32", [1], [], 0, 0],
    ["w", 0, "float32", [-1], [1], 0, 0],
    ["w", 0, "float32", [1.0], [1], 0, 0],
    ["w", 0, "float32", [1], [1 << 60], 0, 0],
    ["w", 0, "float32", [1], [1], -4, 0],
    ["w", 0, "float32", [1] * 65, [1] * 65, 0, 0],
    ["d", [], [None]],
    ["d", ["a"], []],
    ["d", ["a"]],
    ["d", "a", [0]],
    ["o", ["a"], [0]],
    ["o", ["a"], [0], "x"],
    ["f", 3, ["a"], [0]],
    ["l"],
    ["l", None],
    ["l", [], []],
    ["n", "m:C", [1], [0]],
    ["n", None, ["a"], [0]],
    ["r", 3, 0],
    ["r", "x"],
]


@pytest.mark.parametrize("tree", MALFORMED, ids=str)
def test_malformed_nodes(tree: Node) -> None:
    for hidden in (tree, ["l", [tree]], ["o", [], [], tree], ["r", "x", tree]):
        with pytest.raises(CorruptObjectError):
            paths(hidden)


def test_holes_must_match_the_values() -> None:
    with pytest.raises(CorruptObjectError, match="1 holes for 2 values"):
        paths(["l", [None]], 2)


@pytest.mark.parametrize(
    "node",
    [
        ["w", 0, "float32", [3], [1], 16, 0],
        ["w", 0, "float32", [7], [1], 0, 0],
        ["w", 0, "float32", [2], [-1], 4, 0],
        ["w", 0, "float32", [1], [1], 2, 0],
        ["w", 0, "float32", [0], [1], 0, 0],
        ["w", 0, "int64", [1 << 40, 2], [0, 3], 0, 0],
        ["w", 1, "np:<i8", [3], [-2], 24, 0],
        ["w", 1, "np:<i8", [5], [1], 0, 0],
        ["w", 1, "np:|O", [1], [1], 0, 0],
        ["w", 0, "int32", [2], [1], 0, 1],
        ["d", ["a", "a"], [0, 0]],
        ["d", [["li", b""]], [0]],
        ["d", [["b", "m", 0]], [0]],
        ["f", "system", ["a"], [0]],
        ["f", "eval", [], []],
    ],
    ids=str,
)
def test_what_parses_but_cannot_be(node: Node) -> None:
    """Nothing outside of a tensor's own memory can be reached, and nothing is called that is not in the format."""
    with pytest.raises(CorruptObjectError):
        restore(Content(Layout(SPECS, ["l", [node]]), []))


nodes = st.recursive(
    st.none()
    | st.integers(-1, 2)
    | st.builds(lambda *parts: ["t", *parts], st.integers(0, 2), st.integers(0, 3))
    | st.builds(
        lambda base, dtype, dims, offset: ["w", base, dtype, [extent for extent, _ in dims], [step for _, step in dims], offset, 0],
        st.integers(0, 1),
        st.sampled_from(["float32", "int64", "uint8", "bool", "np:<i8", "np:|u1", "np:<U1", "nonsense", "np:>f16"]),
        st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 4)), max_size=3),
        st.integers(0, 40),
    ),
    lambda inner: (
        st.builds(lambda tag, items: [tag, items], st.sampled_from("lu"), st.lists(inner, max_size=3))
        | st.builds(
            lambda tag, items: [tag, [key for key, _ in items], [item for _, item in items]],
            st.sampled_from("dco"),
            st.lists(st.tuples(st.sampled_from(["a", 1, None, ["u", [1]], ["size", [2]]]), inner), max_size=3),
        )
        | st.builds(lambda items: ["f", "list", [str(n) for n in range(len(items))], items], st.lists(inner, max_size=2))
    ),
    max_leaves=6,
)


@given(nodes)
def test_hostile_trees_raise_only_our_errors(tree: Node) -> None:
    from tensorstore_ck.errors import StoreError

    try:
        parsed = parse(Layout(SPECS, tree), 0)
        assert all(isinstance(leaf, Leaf) for leaf in leaves(parsed))
        restore(Content(Layout(SPECS, tree), []))
    except StoreError:
        pass
