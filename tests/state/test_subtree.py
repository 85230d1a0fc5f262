"""Subtrees among the values: what was one opaque item elsewhere is a state like any other once it is read."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tensorstore_ck.engine.interfaces import CapturedState, ListedSources
from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.layout import Layout, Node
from tensorstore_ck.format.tree import expand, leaves, parse
from tensorstore_ck.state import restore
from tensorstore_ck.state.opaque_item import capture_value
from tests.effort import effort
from tests.state.fake import FakeContent, assert_same
from tests.state.samples import states


def read_back(value: object) -> FakeContent:
    """A state ``{"before": 1, "item": value, "after": 2}`` whose layout was made without knowing the value."""
    blobs: list[bytes] = []
    hole = capture_value(value, "item").hole(blobs)
    content = FakeContent(
        CapturedState(Layout([], ["d", ["before", "item", "after"], [None, None, None]]), [1, hole, 2], blobs, ListedSources())
    )
    tree, values, _ = expand(content.layout.tree, content.values)
    content.layout, content.values = replace(content.layout, tree=tree), values
    return content


@settings(max_examples=effort(40, 200))
@given(states)
def test_any_value_comes_back(value: object) -> None:
    assert_same({"before": 1, "item": value, "after": 2}, restore(read_back(value)))


def test_names_are_those_of_a_state() -> None:
    content = read_back({"a": [1, "x"], "b": {"c": None}, "t": (torch.ones(2), np.ones(3))})
    tree = parse(content.layout, len(content.values))
    assert [leaf.path for leaf in leaves(tree)] == ["before", "item.a.0", "item.a.1", "item.b.c", "item.t.0", "item.t.1", "after"]


def test_large_values_are_blobs() -> None:
    value = ["x", b"y" * 100_000, torch.arange(50_000)]
    content = read_back(value)
    assert len(content.blobs) == 2
    assert_same(value, restore(content)["item"])


def test_parameters_stay_parameters() -> None:
    item = restore(read_back((torch.nn.Parameter(torch.ones(2)), torch.ones(2).requires_grad_(), torch.ones(2))))["item"]
    assert [type(each) is torch.nn.Parameter for each in item] == [True, False, False]
    assert [each.requires_grad for each in item] == [True, True, False]


def test_what_has_no_form_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedValueError, match=r"optim\.x\.1"):
        capture_value({"x": [1, object()]}, "optim")
    with pytest.raises(UnsupportedValueError, match=r"optim\.x"):
        capture_value({"x": torch.ones(2).to_sparse()}, "optim")


@pytest.mark.parametrize(
    ("node", "values"),
    [
        (None, [["tree", ["l", [None, None]], [1]]]),
        (None, [["tree", ["l", [None]], [1, 2]]]),
        (None, [["tree", ["l", [0]], []]]),
        (None, [["tree", ["l", [["t", 0, 0]]], []]]),
        (None, [["tree", ["d", [1], []]]]),
        (None, [["tree"]]),
        (None, [["tree", ["l", 7], []]]),
        (None, [["tree", [], []]]),
        (["l", [None, None]], [["tree", ["l", []], []]]),
        (["d", ["a"]], [["tree", ["l", []], []]]),
    ],
)
def test_malformed_subtrees_are_damage(node: Node, values: list[Any]) -> None:
    with pytest.raises(CorruptObjectError, match="subtree"):
        expand(node, values)


@pytest.mark.parametrize(
    "value",
    [
        ["tensor", "float32", [2], 0, b"1234"],
        ["tensor", "float32", [-1], 0, b""],
        ["tensor", "float32", [1 << 62, 4], 0, b""],
        ["tensor", "float32", [2], 9, b"12345678"],
        ["tensor", "np:<f4", [2], 0, b"1234"],
        ["tensor", "np:|O", [1], 0, b"12345678"],
        ["tensor", 4, [2], 0, b"1234"],
        ["tensor", "float32", [2], 0],
        ["tree", None, [1]],
    ],
)
def test_malformed_tensors_among_values_are_damage(value: object) -> None:
    content = FakeContent(CapturedState(Layout([], ["d", ["item"], [None]]), [value], [], ListedSources()))
    with pytest.raises(CorruptObjectError):
        restore(content)
