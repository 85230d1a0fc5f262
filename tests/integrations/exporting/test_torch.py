"""--to torch: what `torch.load` reads is what `Store.checkout` gives, in types, values and sharing."""

import collections
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.tree import parse
from tensorstore_ck.integrations.exporting import export_snapshot
from tensorstore_ck.integrations.exporting.meta_state import MetaState
from tests.gc.stores import open_store
from tests.integrations.exporting.conftest import Export
from tests.integrations.exporting.states import many_ranks, small_blocks, tensors_of, without_unsavable
from tests.state.fake import assert_same, stored
from tests.state.samples import Pair, Point

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def sharing(state: Any) -> list[tuple[str, int, int, tuple[int, ...]]]:
    """Which tensors lie in one storage, and where in it."""
    numbers: dict[int, int] = {}
    return [
        (name, numbers.setdefault(found.untyped_storage().data_ptr(), len(numbers)), int(found.storage_offset()), found.stride())
        for name, found in tensors_of(state).items()
        if found.numel()
    ]


def test_round_trip(store: tsck.Store, export: Export, unsavable: list[str], tmp_path: Path) -> None:
    report = export(tmp_path / "run.pt", "torch", exclude=unsavable)
    expected = store.checkout("run")
    without_unsavable(expected)
    for mapped in (True, False):
        back = torch.load(tmp_path / "run.pt", weights_only=True, mmap=mapped)
        assert_same(expected, back)
        assert sharing(expected) == sharing(back)
    assert type(back["parameter"]) is torch.nn.Parameter
    assert back["model"]._metadata == expected["model"]._metadata
    assert (report.left_out, report.notes) == ({}, ())
    assert [tuple(file) for file in report.files] == [("run.pt", (tmp_path / "run.pt").stat().st_size)]
    assert report.tensors == len(tensors_of(expected))


def test_dtypes_that_torch_cannot_save_are_refused_by_name(export: Export, unsavable: list[str], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"dtypes\.\w+ \(torch\.\w+\).* --exclude NAME") as caught:
        export(tmp_path / "out", "torch")
    assert caught.value.object_id in unsavable
    assert list(tmp_path.iterdir()) == []


def test_it_is_a_whole_zip_file(export: Export, unsavable: list[str], tmp_path: Path) -> None:
    export(tmp_path / "run.pt", "torch", exclude=unsavable)
    data = (tmp_path / "run.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "run.pt") as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            end = info.header_offset + 30 + sum(struct.unpack_from("<2H", data, info.header_offset + 26)) + info.file_size
            assert not info.file_size or struct.unpack_from("<4sI", data, end) == (b"PK\7\10", info.CRC)


def test_it_has_the_bytes_that_torch_save_writes(store: tsck.Store, export: Export, unsavable: list[str], tmp_path: Path) -> None:
    export(tmp_path / "out", "torch", exclude=[*unsavable, "neighbours"])  # what lies between neighbours has no value
    expected = store.checkout("run")
    without_unsavable(expected)
    del expected["neighbours"]
    with (tmp_path / "archive.pt").open("wb") as file:
        torch.save(expected, file)  # by its name, torch would call the archive otherwise
    with zipfile.ZipFile(tmp_path / "out" / "model.pt") as ours, zipfile.ZipFile(tmp_path / "archive.pt") as theirs:
        for one, other in zip(ours.infolist(), theirs.infolist(), strict=True):
            assert one.filename == other.filename
            if "/data/" in one.filename:  # data.pkl may remember equal strings in another way
                assert (one.CRC, one.file_size) == (other.CRC, other.file_size)


def test_several_ranks(tmp_path: Path) -> None:
    store, tensors = many_ranks()
    export_snapshot(store, "job", tmp_path / "job.pt", format="torch")
    back = torch.load(tmp_path / "job.pt", weights_only=True, mmap=True)
    assert_same({**tensors, "text": "text", "number": 7}, back)


def test_what_torch_does_not_load_with_weights_only_is_reported(tmp_path: Path) -> None:
    state = {"array": np.arange(1000.0), "point": Point(torch.ones(2000), 3), "tensor": torch.ones(3), "scalar": np.float32(2)}
    with open_store(small_blocks()) as store:
        store.put_snapshot(state, ref="run")
        report = export_snapshot(store, "run", tmp_path / "run.pt", format="torch")
    (note,) = report.notes
    assert "weights_only=False" in note
    assert "tests.state.samples.Point" in note
    assert_same(state, torch.load(tmp_path / "run.pt", weights_only=False))


def test_registered_types_get_tensors_with_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.state.registered_types._registered_classes", {})
    monkeypatch.setattr("tensorstore_ck.state.registered_types._registered_names", {})
    tsck.register_type(Pair, "pair", lambda pair: [pair.left, pair.right], lambda items: Pair(items[0] + 1, items[1]))
    with open_store(small_blocks()) as store:
        store.put_snapshot({"pair": Pair(torch.zeros(5000), torch.arange(3000.0)), "alone": torch.ones(3000)}, ref="run")
        export_snapshot(store, "run", tmp_path / "run.pt", format="torch")
    back = torch.load(tmp_path / "run.pt", weights_only=False)
    assert torch.equal(back["pair"].left, torch.ones(5000))
    assert torch.equal(back["pair"].right, torch.arange(3000.0))
    assert torch.equal(back["alone"], torch.ones(3000))


def test_no_memory_is_filled_for_tensors_that_only_pass_through() -> None:
    content = stored({"a": torch.ones(1 << 20)})
    torch.use_deterministic_algorithms(True)
    try:
        hollow = MetaState(content, parse(content.layout, 0), frozenset())
        assert getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009 - mypy does not see it
    finally:
        torch.use_deterministic_algorithms(False)
    assert not hollow.state["a"].isnan().all()  # as torch fills it
    assert content.reads == []


def test_two_dtypes_of_one_memory_are_refused_by_name(tmp_path: Path) -> None:
    base = torch.randn(1000)
    with open_store(small_blocks()) as store:
        store.put_snapshot({"one": base, "two": base.view(torch.int32)}, ref="run")
        with pytest.raises(UnsupportedValueError, match="'one' and 'two' share memory") as caught:
            export_snapshot(store, "run", tmp_path / "run.pt", format="torch")
        assert caught.value.object_id == "two"
        assert list(tmp_path.iterdir()) == []
        export_snapshot(store, "run", tmp_path / "run.pt", format="torch", exclude=["two"])
    assert torch.equal(torch.load(tmp_path / "run.pt")["one"], base)


def test_a_type_that_is_gone_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(NamedTuple):
        x: torch.Tensor

    Gone.__qualname__ = "Gone"
    monkeypatch.setattr(sys.modules[__name__], "Gone", Gone, raising=False)
    with open_store(small_blocks()) as store:
        store.put_snapshot({"gone": Gone(torch.ones(3))}, ref="run")
        monkeypatch.delattr(sys.modules[__name__], "Gone")
        with pytest.raises(UnsupportedValueError, match="Gone"):
            export_snapshot(store, "run", tmp_path / "run.pt", format="torch")
    assert list(tmp_path.iterdir()) == []


def test_select_and_skip(export: Export, state: dict[str, Any], tmp_path: Path) -> None:
    export(tmp_path / "a.pt", "torch", select=["model", "tied.*"], exclude=["*.bias", "tied.row"])
    back = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)
    names = [name for name in tensors_of({key: state[key] for key in ("model", "tied")}) if not name.endswith((".bias", "tied.row"))]
    assert list(tensors_of(back)) == names
    assert isinstance(back["model"], collections.OrderedDict)
    assert all(torch.equal(found, tensors_of(state)[name]) for name, found in tensors_of(back).items())


def test_a_torch_that_reads_something_else_is_noticed(
    export: Export, unsavable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = torch.load

    def load_turned(*args: Any, **options: Any) -> Any:
        found = load(*args, **options)
        found["large"] = found["large"].t()
        found["step"] = 13
        return found

    monkeypatch.setattr(torch, "load", load_turned)
    with pytest.raises(CorruptObjectError, match="torch reads something else"):
        export(tmp_path / "out", "torch", exclude=unsavable)
    assert list(tmp_path.iterdir()) == []
