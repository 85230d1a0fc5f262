"""--to safetensors: every tensor by name, bit by bit; the rest listed and in values.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.exporting import export_snapshot
from tests.gc.stores import open_store
from tests.integrations.exporting.conftest import Export
from tests.integrations.exporting.states import RANKS, SUPPORTED, many_ranks, small_blocks, tensors_of
from tests.session.group.built import stage
from tests.session.group.states import whole
from tests.session.group.stores import put_all
from tests.state.fake import bits

UNKNOWN = ["dtypes.*"]


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (one.dtype, one.shape), name
        assert bits(other) == bits(one), name


def unsupported(state: dict[str, Any]) -> list[str]:
    return [f"dtypes.{name}" for name in state["dtypes"] if name not in SUPPORTED]


def test_round_trip(export: Export, state: dict[str, Any], tmp_path: Path) -> None:
    report = export(tmp_path / "out", "safetensors", exclude=unsupported(state))
    for name in unsupported(state):
        del state["dtypes"][name.partition(".")[2]]
    expected = tensors_of(state)
    require_equal(load_file(tmp_path / "out" / "model.safetensors"), expected)
    assert len(state["dtypes"]) == len(SUPPORTED)
    assert report.tensors == len(expected)
    assert [file.name for file in report.files] == ["model.safetensors", "values.json"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "author": "me", "lr": "0.0003"}
        assert torch.equal(file.get_slice("large")[10:20], state["large"][10:20])


def test_values_are_listed_and_next_to_it(export: Export, tmp_path: Path) -> None:
    report = export(tmp_path / "out", "safetensors", exclude=UNKNOWN)
    found = json.loads((tmp_path / "out" / "values.json").read_text())
    assert report.left_out.keys() == found["values"].keys() | found["as_text"].keys()
    assert found["values"]["step"] == 12
    assert found["values"]["values.2"] == 2**70
    assert found["values"]["values.5"] == "text\n\u2603"
    assert found["values"]["values.8"] == [1, 2]
    assert found["as_text"]["values.4"] == "nan"
    assert found["as_text"]["values.6"] == "b'bytes'"
    assert found["as_text"]["types.0"] == "torch.float16"
    assert set(report.left_out.values()) == {"not a tensor; in values.json"}


def test_one_file(export: Export, state: dict[str, Any], tmp_path: Path) -> None:
    report = export(tmp_path / "a.safetensors", "safetensors", exclude=UNKNOWN, max_file_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    del state["dtypes"]
    require_equal(load_file(tmp_path / "a.safetensors"), tensors_of(state))
    assert report.left_out["step"] == "not a tensor"


def test_numbered_files_with_an_index(export: Export, state: dict[str, Any], tmp_path: Path) -> None:
    report = export(tmp_path / "out", "safetensors", exclude=UNKNOWN, max_file_bytes=100_000)
    del state["dtypes"]
    expected = tensors_of(state)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == report.tensor_bytes == sum(found.nbytes for found in expected.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    found = {name: load_file(tmp_path / "out" / file)[name] for name, file in index["weight_map"].items()}
    require_equal(found, expected)
    assert sum(len(load_file(tmp_path / "out" / file)) for file in files) == len(expected)
    for file in files:
        each = load_file(tmp_path / "out" / file)
        assert len(each) == 1 or sum(one.nbytes for one in each.values()) <= 100_000


def test_unknown_dtypes_are_refused_by_name_before_anything_is_written(export: Export, state: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"dtypes\.\w+ \(torch\.\w+\), .* --exclude NAME") as caught:
        export(tmp_path / "out", "safetensors")
    assert caught.value.object_id in unsupported(state)
    assert list(tmp_path.iterdir()) == []


def test_arrays(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        kind: np.arange(6).astype(kind).reshape(2, 3) for kind in ("i1", "u2", "<i4", "u8", "f2", "f4", "<f8", "c8", "?")
    }
    arrays["turned"] = arrays["f4"].T
    with open_store(small_blocks()) as store:
        store.put_snapshot(
            {**arrays, "large": np.arange(5000.0)[::-1], "big": np.arange(3, dtype=">f4"), "text": np.array(["a"])}, ref="run"
        )
        with pytest.raises(UnsupportedValueError, match=r"big \(>f4\), text \(<U1\)"):
            export_snapshot(store, "run", tmp_path / "a.safetensors", format="safetensors")
        export_snapshot(store, "run", tmp_path / "a.safetensors", format="safetensors", exclude=["big", "text"])
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        for name, array in arrays.items():
            found = file.get_tensor(name)
            assert found.dtype == array.dtype, name
            assert np.array_equal(found, array), name
        assert np.array_equal(file.get_tensor("large"), np.arange(5000.0)[::-1])


def test_several_ranks(tmp_path: Path) -> None:
    store, tensors = many_ranks()
    export_snapshot(store, "job", tmp_path / "job", format="safetensors")
    require_equal(load_file(tmp_path / "job" / "model.safetensors"), tensors)


def test_a_pipeline_whose_stages_have_values_of_their_own(tmp_path: Path) -> None:
    backend = small_blocks()
    put_all(backend, RANKS, stage)
    export_snapshot(open_store(backend), "job", tmp_path / "job", format="safetensors")
    found = load_file(tmp_path / "job" / "model.safetensors")
    assert found.keys() == {"first", "second", "tied", "told"}
    for name, tensor in found.items():
        assert np.array_equal(tensor.numpy(), whole(tensor.shape, 9 if name.startswith("told") else 0)), name


def test_a_reserved_name_is_refused(tmp_path: Path) -> None:
    with open_store(small_blocks()) as store:
        store.put_snapshot({"__metadata__": torch.ones(3), "a": torch.ones(3)}, ref="run")
        with pytest.raises(UnsupportedValueError, match="__metadata__"):
            export_snapshot(store, "run", tmp_path / "out", format="safetensors")
        export_snapshot(store, "run", tmp_path / "out", format="safetensors", exclude=["__metadata__"])
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"a"}


def test_names_that_are_no_unicode_and_no_tensors_at_all(tmp_path: Path) -> None:
    with open_store(small_blocks()) as store:
        store.put_snapshot({"a\ud800": torch.ones(3), "\u2603": torch.ones(2), 'q"\\': torch.ones(1)}, ref="run")
        store.put_snapshot({"a": 1}, ref="none")
        export_snapshot(store, "run", tmp_path / "a.safetensors", format="safetensors")
        export_snapshot(store, "none", tmp_path / "b.safetensors", format="safetensors")
    assert set(load_file(tmp_path / "a.safetensors")) == {"'a\\ud800'", "\u2603", 'q"\\'}
    assert load_file(tmp_path / "b.safetensors") == {}


def test_strided_views_go_through_a_scratch_file_that_vanishes(tmp_path: Path) -> None:
    base = torch.randn(200, 300)
    state = {"base": base, "turned": base.t(), "every": base[::3, 5:50], "flipped": np.flip(np.arange(4000.0).reshape(40, 100), 1)}
    with open_store(small_blocks()) as store:
        store.put_snapshot(state, ref="run")
        report = export_snapshot(store, "run", tmp_path / "out", format="safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["turned"], base.t())
    assert torch.equal(found["every"], base[::3, 5:50])
    assert np.array_equal(found["flipped"].numpy(), np.flip(np.arange(4000.0).reshape(40, 100), 1))
    assert [file.name for file in report.files] == ["model.safetensors"]
