"""Restoring into a state under other names: what `rename=` leaves out or moves; and in which order a report says what does not fit."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import MismatchError, UnsupportedValueError
from tensorstore_ck.state import LoadReport, restore
from tests.state.fake import assert_same, stored


@dataclass
class Pair:
    """A registered type."""

    a: object
    b: object


tsck.register_type(Pair, "tests.into_renamed.Pair")

# --- what rename= leaves out or moves, and registered types ------------------------------------------------------------


@pytest.mark.parametrize("rename", [lambda name: None if name == "c.b" else name, {"c.a": "c.a", "w": "w"}.get], ids=["drop", "get"])
def test_what_rename_leaves_out_of_a_registered_type_stays(rename: Any) -> None:
    content = stored({"c": Pair(torch.ones(2), torch.ones(2)), "w": torch.ones(2)})
    target = {"c": Pair(torch.zeros(2), torch.zeros(2)), "w": torch.zeros(2)}
    with pytest.raises(MismatchError, match=r"1 missing in the snapshot: c\.b\. "):
        restore(content, into=target, rename=rename)
    report = LoadReport()
    restored = restore(content, into=target, rename=rename, strict=False, report=report)
    assert_same([restored["c"].a, restored["c"].b, restored["w"]], [torch.ones(2), torch.zeros(2), torch.ones(2)])
    assert report == LoadReport(missing=["c.b"])


def test_an_empty_target_takes_what_rename_moves_up_and_leaves_there() -> None:
    assert restore(stored({"model": {"w": 1, "o": [1]}}), into={}, rename={"model": ""}) == {"w": 1, "o": [1]}
    saved = {"opt": {"state": {0: 7}, "groups": [{"lr": 1, "eps": 2}]}}
    target: dict[str, Any] = {"opt": {}, "lr": 0}
    restore(stored(saved), into=target, rename={"opt.groups.0.lr": "lr"})
    assert target == {"opt": {"state": {0: 7}, "groups": [{"eps": 2}]}, "lr": 1}
    target = {"o": {}, "lr": 0}
    restore(stored(saved), into=target, rename={"opt": "o", "opt.groups.0.lr": "lr"})
    assert target == {"o": {"state": {0: 7}, "groups": [{"eps": 2}]}, "lr": 1}


def test_attributes_are_restored_only_with_all_their_names() -> None:
    saved = OrderedDict(a=1, b=2, c=3)
    saved._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    for rename, target, has_attributes in (
        ({"m.b": "m.d"}, OrderedDict(a=0, d=0, c=0), False),
        (lambda name: None if name == "m.b" else name, OrderedDict(a=0, c=0), True),
    ):
        restore(stored({"m": saved}), into={"m": target}, rename=rename)
        assert sum(target.values()) == (6 if "d" in target else 4)
        assert hasattr(target, "_metadata") == has_attributes


# --- the order of a report --------------------------------------------------------------------------------------------


def test_a_target_that_contains_itself_twice_is_refused_at_once() -> None:
    target: dict[str, Any] = {"w": torch.zeros(1), "child": {}}
    target["child"]["parent"] = target["self"] = target["a long name of the same"] = target
    for saved, rename in (({"w": torch.ones(1), "child": {"x": 1}}, None), ({"z": {"w": torch.ones(1), "child": {"x": 1}}}, {"z": ""})):
        with pytest.raises(UnsupportedValueError, match="does something contain itself"):
            restore(stored(saved), into=target, strict=False, rename=rename)


def test_a_report_has_the_order_of_the_target() -> None:
    target = {"z": {"\u00e9": 0, "y": [torch.zeros(1), {"x": 0}]}, "b": 0, "a": {"c": 0}}
    report = LoadReport()
    restore(stored({"q": 1}), into=target, strict=False, report=report)
    assert report.missing == ["z.\u00e9", "z.y.0", "z.y.1.x", "b", "a.c"]
    target = {"n": {"z": {"y": 0, "x": 0}, "b": 0}}
    restore(stored({"m": {"z": {"v": 1}, "b": {"u": 2}}}), into=target, strict=False, report=report, rename={"m": "n", "m.b.u": "n.b.t"})
    assert report.missing == ["n.z.y", "n.z.x", "n.b"]
