"""`tsck show --stats` and `tsck diff --stats`."""

import math

import pytest
import torch

import tensorstore_ck
from tests.cli.conftest import Tsck


@pytest.fixture
def diverging(tsck: Tsck) -> Tsck:
    state = {"w": torch.tensor([1.0, -2.0]), "same": torch.ones(3), **{f"bias{n:02}": torch.zeros(1) for n in range(40)}}
    with tensorstore_ck.open("ck", create=True) as store:
        store.put_snapshot(state, ref="runs/gpt")
        with pytest.warns(tensorstore_ck.SuspiciousSaveWarning):
            store.put_snapshot({**state, "w": torch.tensor([1.0, math.nan])}, ref="runs/gpt")
    return tsck


def test_show_has_a_row_of_statistics_for_each_tensor(diverging: Tsck) -> None:
    lines = diverging("show", "runs/gpt~1", "--stats").out.splitlines()
    at = lines.index("statistics of 42 tensors")
    assert lines[at + 1].split() == ["NAME", "NAN", "INF", "ZEROS", "MIN", "MAX", "MEAN", "STD", "NORM"]
    assert lines[at + 2].split() == ["w", "0", "0", "0", "-2", "1", "-0.5", "1.5", "2.23607"]
    assert lines[-1] == "  ... and 2 more (--all shows them)"
    assert "bias39" in diverging("show", "runs/gpt~1", "--stats", "--all").out
    assert "statistics" not in diverging("show", "runs/gpt~1").out


def test_nan_is_named(diverging: Tsck) -> None:
    assert "statistics of 42 tensors; 1 tensor with NaN or infinity: w" in diverging("show", "runs/gpt", "--stats").out


def test_show_for_programs(diverging: Tsck) -> None:
    document = diverging("show", "runs/gpt", "--stats", "--json").json
    assert document["snapshot"]["ref"] == "runs/gpt"
    assert len(document["statistics"]) == 42
    assert document["statistics"][0] | {"norm": 1, "histogram": None} == {
        "name": "w",
        "dtype": "float32",
        "shape": [2],
        "count": 2,
        "nan": 1,
        "inf": 0,
        "zeros": 0,
        "min": 1.0,
        "max": 1.0,
        "mean": 1.0,
        "std": 0.0,
        "norm": 1,
        "histogram": None,
    }


def test_diff_says_by_how_much_numbers_changed(diverging: Tsck) -> None:
    out = diverging("diff", "runs/gpt~1", "runs/gpt", "--stats").out
    assert out.splitlines()[-3:-1] == ["by how much the numbers changed", "  NAME  CHANGE   RELATIVE  MAX  NAN  INF"]
    assert out.splitlines()[-1].split() == ["w", "changed", "inf", "inf", "1", "0"]
    assert "numbers changed" not in diverging("diff", "runs/gpt~1", "runs/gpt").out
    assert "numbers changed" not in diverging("diff", "runs/gpt", "runs/gpt", "--stats").out


def test_diff_for_programs(diverging: Tsck) -> None:
    document = diverging("diff", "runs/gpt~1", "runs/gpt", "--stats", "--json").json
    assert document["tensors"][0]["name"] == "w"
    assert [(each["name"], each["relative_change"], each["nan"]) for each in document["statistics"]] == [("w", "inf", 1)]
