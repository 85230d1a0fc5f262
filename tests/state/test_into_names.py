"""Restoring into a state that is there: which names, shapes and dtypes fit, and what is said about the others."""

import copy
import warnings
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError, MismatchError, UnsupportedValueError
from tensorstore_ck.state import LoadReport, LoadWarning, capture, register_type, restore
from tests.state.fake import FakeContent, assert_same, stored
from tests.state.samples import Pair

# --- dtype and rename -------------------------------------------------------------------------------------------------


def test_targets_decide_about_their_dtype() -> None:
    state = {"w": torch.randn(3, 4), "moment": torch.randn(3, 4), "strided": torch.randn(4, 3)}
    target = {
        "w": torch.zeros(3, 4, dtype=torch.bfloat16),
        "moment": torch.zeros(3, 4),
        "strided": torch.zeros(3, 4, dtype=torch.bfloat16).t(),
    }
    with pytest.raises(MismatchError, match="2 do not match: w: bfloat16 here, float32 in the snapshot, strided: "):
        restore(stored(state), into=target)
    restore(FakeContent(capture(state), 5), into=target, dtype=torch.bfloat16)
    assert_same(target, {"w": state["w"].bfloat16(), "moment": state["moment"], "strided": state["strided"].bfloat16()}, in_order=False)


def test_converted_and_tied() -> None:
    weight = torch.randn(2, 3)
    memory = torch.zeros(2, 3, dtype=torch.bfloat16)
    target = {"a": memory, "b": memory.view(2, 3), "c": torch.zeros(2, 3), "d": torch.zeros(3, dtype=torch.bfloat16)}
    restore(stored({"a": weight, "b": weight[:], "c": weight[:], "d": weight[1]}), into=target, dtype=torch.bfloat16)
    assert_same(target, {"a": weight.bfloat16(), "b": weight.bfloat16(), "c": weight, "d": weight[1].bfloat16()}, in_order=False)


@pytest.mark.parametrize(
    ("rename", "names"),
    [
        ({"module": "net"}, {"module.w": "net.w", "module_ema.w": "module_ema.w", "module": "net"}),
        ({"module.": ""}, {"module.w": "w", "module.a.w": "a.w"}),
        ({"": "model"}, {"w": "model.w", "a.w": "model.a.w"}),
        ({"a": "x", "a.b": "y"}, {"a.b.c": "y.c", "a.c": "x.c"}),
        (lambda name: name.replace("old", "new") if name != "no" else None, {"old.w": "new.w"}),
    ],
)
def test_rename(rename: Any, names: dict[str, str]) -> None:
    for old, new in names.items():
        target = {new: torch.zeros(2)}
        restore(stored({old: torch.ones(2)}), into=target, rename=rename)
        assert target[new].tolist() == [1, 1]


def test_rename_leaves_out_and_moves_subtrees() -> None:
    state = {"model": {"a": torch.ones(1), "b": torch.ones(2)}, "opt": {"state": {0: {"m": torch.ones(3)}}, "lrs": [0.1, 0.2]}}
    target: dict[str, Any] = {"a": torch.zeros(1), "o": {"state": {}, "lrs": []}}
    restore(stored(state), into=target, rename=lambda name: None if name == "model.b" else name.replace("model.", "").replace("opt", "o"))
    assert_same(target, {"a": torch.ones(1), "o": {"state": {0: {"m": torch.ones(3)}}, "lrs": [0.1, 0.2]}})
    target = {"a": torch.zeros(1), "b": torch.zeros(2), "o": {"state": {}, "lrs": None}}
    restore(stored(state), into=target, rename={"opt": "o", "model": ""})
    assert_same(target, {"a": torch.ones(1), "b": torch.ones(2), "o": {"state": {0: {"m": torch.ones(3)}}, "lrs": [0.1, 0.2]}})


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda name: "same", "the same name 'same'"),
        (lambda name: 3, "rename gave 3 for 'a'"),
        ({"a": 1}, "strings to strings"),
        (5, "a mapping of prefixes or a function"),
    ],
)
def test_bad_rename(rename: Any, message: str) -> None:
    with pytest.raises((InvalidOptionError, MismatchError), match=message):
        restore(stored({"a": torch.ones(1), "b": 2}), into={"same": torch.ones(1)}, rename=rename)


# --- what does not fit ------------------------------------------------------------------------------------------------

STORED = {
    "fits": torch.ones(2),
    "shape": torch.ones(3),
    "dtype": torch.ones(1),
    "extra": torch.ones(1),
    "value": 5,
    "array": np.ones(1),
    "plain": 1,
}


def partial() -> dict[str, Any]:
    return {
        "fits": torch.zeros(2),
        "shape": torch.zeros(4),
        "dtype": torch.zeros(1, dtype=torch.int32),
        "new": torch.zeros(1),
        "newer": 3,
        "value": torch.zeros(1),
        "array": torch.zeros(1, dtype=torch.float64),
        "plain": 0,
    }


def test_strict_lists_everything_and_changes_nothing() -> None:
    target = partial()
    content = stored(STORED)
    with pytest.raises(MismatchError) as caught:
        restore(content, into=target)
    for part in (
        "2 missing in the snapshot: new, newer",
        "1 not expected by `into`: extra",
        "4 do not match: shape: shape [4] here, [3] in the snapshot, dtype: int32 here, float32 in the snapshot, "
        "value: a tensor here, a plain value in the snapshot, array: float64 here, numpy <f8 in the snapshot",
        "strict=False",
    ):
        assert part in str(caught.value)
    assert caught.value.object_id == "new"
    assert_same(partial(), target)
    assert not content.reads


def test_not_strict_loads_what_fits_and_reports_the_rest() -> None:
    target, report = partial(), LoadReport(missing=["stale"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore(stored(STORED), into=target, strict=False, report=report)
    assert (report.missing, report.unexpected) == (["new", "newer"], ["extra"])
    assert [line.partition(":")[0] for line in report.mismatched] == ["shape", "dtype", "value", "array"]
    assert_same(target, {**partial(), "fits": torch.ones(2), "plain": 1})


def test_what_a_terminal_obeys_is_escaped_in_the_warning() -> None:
    with pytest.warns(LoadWarning, match=r"1 not expected by `into`: a\\x1b\[2Jb$"):
        restore(stored({"a\x1b[2Jb": 1}), into={"b": 1}, strict=False)


def test_not_strict_warns_without_a_report() -> None:
    with pytest.warns(LoadWarning, match="2 missing in the snapshot: new, newer"):
        restore(stored(STORED), into=partial(), strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore(stored({"a": 1}), into={"a": 2}, strict=False)


def test_long_lists_are_cut() -> None:
    with pytest.raises(MismatchError, match="50 missing in the snapshot: 0, 1, 2, 3, 4, 5, 6, 7 and 42 more"):
        restore(stored([]), into=[torch.zeros(1) for _ in range(50)])


def test_select_limits_what_is_missing() -> None:
    state = {"model": {"w": torch.ones(1)}, "opt": {"m": torch.ones(1)}}
    target = {"model": {"w": torch.zeros(1)}, "opt": {"m": torch.zeros(1), "v": torch.zeros(1)}, "epoch": 9}
    restore(stored(state), into=target, select=["model.*"])
    assert target["model"]["w"] == 1  # type: ignore[index]
    assert target["opt"]["m"] == 0  # type: ignore[index]
    with pytest.raises(MismatchError, match=r"1 missing in the snapshot: opt\.v"):
        restore(stored(state), into=target, select=["opt.*"])


def test_read_only_arrays() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(MismatchError, match="read-only"):
        restore(stored({"x": np.ones(3)}), into={"x": array})


def test_targets_that_cannot_be_filled() -> None:
    content = stored({"x": torch.ones(1)})
    for bad, advice in (
        (torch.nn.Linear(1, 1), r"restore into its \.state_dict\(\), and pass that to its \.load_state_dict\(\)"),
        (torch.eye(2).to_sparse(), "to_dense"),
        (np.ma.array([1]), "numpy subclass"),
    ):
        with pytest.raises(UnsupportedValueError, match=f"cannot restore into x: .*{advice}"):
            restore(content, into={"x": bad})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        restore(content, into=endless)


def test_a_failed_read_says_that_the_target_is_undefined() -> None:
    content = stored({"x": torch.ones(3), "epoch": 5})
    content.fail = CorruptObjectError("packs/x is damaged", object_id="packs/x")
    target = {"x": torch.zeros(3), "epoch": 1}
    with pytest.raises(CorruptObjectError, match=r"packs/x is damaged .*`into` are now undefined") as caught:
        restore(content, into=target)
    assert caught.value.object_id == "packs/x"
    assert target["epoch"] == 1
    content.fail = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt) as interrupted:
        restore(content, into=target)
    assert "undefined" in interrupted.value.__notes__[0]


def test_ordered_dicts_and_types_of_the_target_stay() -> None:
    target = OrderedDict(a=1)
    assert type(restore(stored({"a": 2}), into=target)) is OrderedDict
    assert target == {"a": 2}


@pytest.mark.parametrize("empty", [{}, []], ids=["dict", "list"])
@pytest.mark.parametrize("is_saved_first", [True, False])
@pytest.mark.parametrize("is_restored_first", [True, False])
def test_a_container_without_leaves_does_not_take_the_leaf_of_a_key_that_is_spelled_like_its_own(
    empty: Any, is_saved_first: bool, is_restored_first: bool
) -> None:
    """The keys "0" and 0, and "a.b" and "a" with "b", have one name."""

    def state(tensor: torch.Tensor, value: int, *, is_empty_first: bool) -> dict[Any, Any]:
        own = {0: type(empty)(), "a.b": type(empty)()}
        other = {"0": tensor, "a": {"b": value}}
        return own | other if is_empty_first else other | own

    saved = state(torch.ones(2), 5, is_empty_first=is_saved_first)
    target = state(torch.zeros(2), 1, is_empty_first=is_restored_first)
    assert_same(restore(stored(saved), into=target), state(torch.ones(2), 5, is_empty_first=is_restored_first))
    restored = restore(stored(saved), into={**target, 0: None})
    assert_same(restored, state(torch.ones(2), 5, is_empty_first=is_restored_first))
    for lacking in ({"0": torch.ones(2), "a": {"b": 5}}, {"x": {"0": torch.ones(2), "a": {"b": 5}}}):
        target = state(torch.zeros(2), 1, is_empty_first=is_restored_first)
        rename = {"x": ""} if "x" in lacking else None
        restored = restore(stored(lacking), into=target, rename=rename)
        assert_same(restored, state(torch.ones(2), 5, is_empty_first=is_restored_first))


@pytest.mark.parametrize("is_reversed", [True, False])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, []),
        ({"x": 1}, []),
        ([1, 2], {}),
        ([1], torch.ones(2)),
        ((), {"x": torch.ones(2)}),
        (OrderedDict(x=torch.ones(1)), torch.ones(2)),
    ],
    ids=str,
)
def test_a_state_with_keys_that_are_spelled_alike_fits_its_own_form(one: Any, other: Any, is_reversed: bool) -> None:
    if isinstance(one, OrderedDict):
        one._metadata = {"version": 2}  # type: ignore[attr-defined]
    pairs = [(0, one), ("0", other)]
    state = dict(reversed(pairs) if is_reversed else pairs)
    into = copy.deepcopy(state)
    if isinstance(one, OrderedDict):
        into[0]._metadata = {}
    restored = restore(stored(state), into=into)
    assert_same(restored, state)
    assert getattr(restored[0], "_metadata", None) == getattr(one, "_metadata", None)


@pytest.mark.parametrize("rename", [None, {"m": "n"}], ids=["same", "renamed"])
def test_leaves_whose_keys_are_spelled_alike_are_restored_by_their_keys(rename: dict[str, str] | None) -> None:
    both = {"0": torch.ones(2), 0: torch.zeros(2), "0#2": torch.ones(2) * 3, "a": {"b": 3}, "a.b": 4, True: [5], "True": ("six",)}
    top = "m" if rename is None else "n"
    target = {
        top: {"True": (None,), True: [0], "a.b": 0, "a": {"b": 0}, 0: torch.ones(2) * 9, "0#2": torch.ones(2) * 9, "0": torch.zeros(2)}
    }
    restored = restore(stored({"m": both}), into=target, rename=rename)[top]
    assert_same({key: restored[key] for key in both}, both)
    report = LoadReport()
    target = {top: {"0": torch.ones(2) * 9, 0: torch.ones(2) * 9, "a": {"b": 0}}}
    restored = restore(stored({"m": {"0": torch.ones(2), "a.b": 4}}), into=target, rename=rename, strict=False, report=report)
    assert_same(restored, {top: {"0": torch.ones(2), 0: torch.ones(2) * 9, "a": {"b": 4}}})
    assert report == LoadReport(missing=[f"{top}.0"])


def test_what_is_not_selected_stays_in_a_list_of_another_length() -> None:
    content = stored({"groups": [{"lr": 1.0, "decay": 2.0}] * 3, "m": {"True": 1, True: {"0": 2, 1: 3}}})
    target = {"groups": [{"lr": 0.1, "decay": 0.2}, {"lr": 0.3, "decay": 0.4}]}
    report = LoadReport()
    restore(content, into=target, select="groups.*.lr", strict=False, report=report)
    assert target == {"groups": [{"lr": 1.0, "decay": 0.2}, {"lr": 1.0, "decay": 0.4}]}
    assert report == LoadReport(unexpected=["groups.2.lr"])
    into: dict[str, Any] = {"groups": None}
    assert restore(content, into=into, select=["groups.1.*"]) == {"groups": [None, {"lr": 1.0, "decay": 2.0}, None]}
    with pytest.raises(MismatchError, match=r"not expected by `into`: m\.True\.0"):
        restore(content, into={"m": {"True": -1}}, select="m.True.0")


def test_names_of_several_values_are_refused_where_a_function_renames_them() -> None:
    content = stored({"m": {"0": torch.ones(2), 0: torch.zeros(2), "w": 1}})
    target: dict[str, Any] = {"n": {0: torch.ones(2) * 9, "v": 0}}
    rename: Any = lambda name: name.replace("m.", "n.").replace("w", "v")  # noqa: E731
    with pytest.raises(MismatchError, match=r"1 do not match: n\.0: several values have this name"):
        restore(content, into=target, rename=rename)
    assert (target["n"][0].tolist(), target["n"]["v"]) == ([9, 9], 0)
    report = LoadReport()
    restore(content, into=target, rename=rename, strict=False, report=report)
    assert (target["n"][0].tolist(), target["n"]["v"]) == ([9, 9], 1)
    assert (report.missing, report.unexpected, len(report.mismatched)) == ([], ["n.0", "n.0#2"], 1)
    content = stored({"m": {"0": torch.ones(2), "w": 1}})
    target = {"n": {0: torch.ones(2) * 9, "0": torch.ones(2) * 9, "v": 0}}
    with pytest.raises(MismatchError, match=r"1 do not match: n\.0: several values have this name"):
        restore(content, into=target, rename={"m": "n", "m.w": "n.v"})
    restore(content, into=target, rename={"m": "n", "m.w": "n.v"}, strict=False, report=report)
    assert_same(target, {"n": {0: torch.ones(2), "0": torch.ones(2) * 9, "v": 1}})
    assert (report.missing, report.unexpected, len(report.mismatched)) == ([], [], 1)


def test_a_leaf_whose_name_is_not_changed_is_restored_by_its_keys() -> None:
    content = stored({"m": {"0": torch.ones(2), 0: torch.ones(2) * 2, "x": torch.ones(2) * 3}, "e": {}})
    target = {"m": {0: torch.zeros(2), "0": torch.zeros(2), "y": torch.zeros(2)}, "e": None}
    restored = restore(content, into=target, rename={"m.x": "m.y"})
    assert_same(restored, {"m": {0: torch.ones(2) * 2, "0": torch.ones(2), "y": torch.ones(2) * 3}, "e": {}})


@pytest.mark.parametrize("select", ["0", "0#2", "a.b", "a.b#2", ["0", "a.b#2"]])
def test_a_selection_fits_its_own_form_though_keys_are_spelled_alike(select: Any) -> None:
    globs = [select] if isinstance(select, str) else select
    for order in (1, -1):
        both: dict[Any, Any] = {"0": 1.0, 0: 2.0, "a": {"b": 3.0}, "a.b": 4.0}
        target: dict[Any, Any] = {"0": 0.0, 0: 0.0, "a": {"b": 0.0}, "a.b": 0.0}
        restored = restore(stored({key: both[key] for key in [*both][::order]}), into=target, select=select)
        values = [restored["0"], restored[0], restored["a"]["b"], restored["a.b"]]
        assert sum(value != 0.0 for value in values) == len(globs)
        assert all(value in (0.0, own) for value, own in zip(values, (1.0, 2.0, 3.0, 4.0), strict=True))


def test_the_items_of_a_list_that_is_one_value_are_not_selected_one_by_one() -> None:
    numbers = [*range(20)]
    target = {"a": {"1": [0, {}], 1: [torch.zeros(1), torch.zeros(1)]}}
    restored = restore(stored({"a": {"1": numbers, 1: [torch.ones(1), torch.ones(1)]}}), into=target, select="a.1.1")
    assert_same(restored, {"a": {"1": [0, {}], 1: [torch.zeros(1), torch.ones(1)]}})
    assert restore(stored({"a": numbers, "b": {"0": 7}}), into={"a": [3, 4], "b": {"0": 0}}, select="*.0") == {"a": [3, 4], "b": {"0": 7}}


def test_rename_holds_within_a_container_that_is_adopted_whole() -> None:
    content = stored({"a": {"x": 1, "y": torch.ones(2), "l": [torch.ones(1), torch.ones(3)]}, "b": {"z": 3}})
    target: dict[str, Any] = {"a": {}, "b": {}}
    restore(content, into=target, rename=lambda name: None if name in ("a.y", "a.l.1") else name)
    assert_same(target, {"a": {"x": 1, "l": [torch.ones(1), None]}, "b": {"z": 3}})
    target = {"a": {}, "b": {}}
    report = LoadReport()
    restore(content, into=target, rename={"a": "c"}, strict=False, report=report)
    assert target == {"a": {}, "b": {"z": 3}}
    assert report.unexpected == ["c.x", "c.y", "c.l.0", "c.l.1"]
    target = {}
    with pytest.raises(MismatchError, match=r"5 not expected by `into`: c\.x"):
        restore(content, into=target, rename={"a": "c"})
    assert target == {}
    assert restore(stored({"a": {"l": []}}), into={"c": {"l": [1, 2]}}, rename={"a": "c"}) == {"c": {"l": []}}


@pytest.mark.parametrize("target", [{"pair": None, "x": 0}, {"x": 0, "pair": None}])
def test_what_rename_moves_out_of_a_registered_type_that_is_taken_whole_is_found_in_any_order(target: dict[str, Any]) -> None:
    register_type(Pair, "tests.Pair", lambda pair: {"left": pair.left, "right": pair.right}, lambda state: Pair(**state))
    content = stored({"pair": Pair(torch.ones(2), 5)})
    assert restore(content, into=target, rename={"pair.right": "x"})["x"] == 5
    with pytest.raises(MismatchError, match="1 not expected by `into`: x"):
        restore(content, into={"pair": None}, rename={"pair.right": "x"})
