"""`show` and `diff`: what they tell, and that they read no tensor's blocks."""

import itertools
import re
from typing import Any

import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.maintenance.describe import TensorChange, ValueChange
from tests.gc.stores import open_store
from tests.maintenance.copy_store.places import Watched


def test_show() -> None:
    store = open_store(MemoryBackend())
    state = {"w": torch.zeros(3, 1000), "n": {"lr": 0.5, "name": "x" * 300, "big": b"y" * 100_000}, "list": [1, None, torch.ones(2)]}
    snapshot = store.put_snapshot(state, ref="runs/a", step=3, metadata={"commit": "abc"}, metrics={"loss": 1.5}, codec="raw")
    details = store.show("runs/a")
    assert details.snapshot == snapshot
    assert details.metadata == {"commit": "abc"}
    assert details.tensors == (("w", "float32", (3, 1000), 12_000), ("list.2", "float32", (2,), 8))
    assert list(details.values) == ["n.lr", "n.name", "n.big", "list.0", "list.1"]
    assert details.values["n.lr"] == 0.5
    assert details.values["n.big"] == "(bytes, 100,000 bytes)"
    assert details.values["list.1"] is None
    assert len(details.packs) == 1
    assert 12_000 < details.stored_bytes < 16_000  # the large value compresses


def test_metadata_is_read_from_the_record_alone() -> None:
    backend: Any = Watched(MemoryBackend())
    snapshot = open_store(backend).put_snapshot({"w": torch.zeros(10)}, ref="runs/a", metadata={"commit": "abc"})
    store = open_store(backend)
    store.resolve("runs/a")
    backend.calls.clear()
    assert store.metadata("runs/a") == {"commit": "abc"}
    (read,) = [name for call, name in backend.calls if not name.startswith("log/")]
    assert re.fullmatch(f"snapshots/../{snapshot.id}", read)
    assert store.show("runs/a").metadata == {"commit": "abc"}


def test_diff_by_blocks() -> None:
    backend: Any = Watched(MemoryBackend())
    store = open_store(backend)
    rows = torch.zeros(12, 1 << 18)  # 12 blocks of 4 rows each of 1 MiB: three blocks of 4 MiB
    state = {"rows": rows, "same": torch.ones(5000), "small": torch.zeros(10), "gone": torch.ones(2), "shape": torch.zeros(4000)}
    store.put_snapshot(state, ref="runs/a", step=1)
    rows[5, 17] = 1
    small = torch.zeros(10)
    small[3] = 1.5
    store.put_snapshot(
        {"rows": rows, "same": torch.ones(5000), "small": small, "shape": torch.zeros(2000, 2), "new": torch.ones(7)}, ref="runs/a", step=2
    )
    backend.bytes_read = 0
    diff = store.diff("runs/a@1", "runs/a@2")
    assert backend.bytes_read < 2000  # layouts
    assert diff.tensors == (
        TensorChange("rows", "changed", ("float32", (12, 1 << 18), 12 << 20), ("float32", (12, 1 << 18), 12 << 20), 4 << 20),
        TensorChange("small", "changed", ("float32", (10,), 40), ("float32", (10,), 40), 2),
        TensorChange("shape", "changed", ("float32", (4000,), 16_000), ("float32", (2000, 2), 16_000), 0),
        TensorChange("new", "added", None, ("float32", (7,), 28), 28),
        TensorChange("gone", "removed", ("float32", (2,), 8), None, 0),
    )
    assert (diff.unchanged_tensors, diff.changed_bytes) == (1, (4 << 20) + 2 + 28)
    assert diff.tensor_bytes == (12 << 20) + 20_000 + 40 + 16_000 + 28
    assert diff.layout_changed
    assert (diff.old.step, diff.new.step) == (1, 2)


def test_diffs_of_one_tensor() -> None:
    """Some grow out of the part, or only their order, layout or nothing changes."""
    store = open_store(MemoryBackend())
    halves = torch.cat([torch.zeros(1 << 20), torch.ones(1 << 20)])  # a block of 4 MiB each
    states = {
        "small": torch.zeros(1000),
        "large": torch.zeros(2000),
        "smaller": torch.zeros(900),
        "again": torch.zeros(900),
        "grad": torch.zeros(900, requires_grad=True),
        "halves": halves,
        "swapped": halves.flip(0),
    }
    for ref, tensor in states.items():
        store.put_snapshot({"w": tensor, "v": [1, 2]}, ref=ref)
    found = {new: store.diff(old, new) for old, new in itertools.pairwise(states)}
    assert {new: diff.changed_bytes for new, diff in found.items() if new != "halves"} == {
        "large": 8000,
        "smaller": 3600,
        "again": 0,
        "grad": 0,
        "swapped": 8 << 20,
    }
    assert [(found[new].tensors, found[new].values, found[new].layout_changed) for new in ("again", "grad")] == [
        ((), (), False),
        ((), (), True),
    ]


def test_diff_of_values() -> None:
    store = open_store(MemoryBackend())
    nan = float("nan")
    old = {"int": 1, "bool": 1, "nan": nan, "text": "a", "big": b"a" * 70_000, "same_big": b"s" * 70_000, "gone": "x"}
    new = {"int": 2, "bool": True, "nan": nan, "text": "a", "big": b"b" * 70_000, "same_big": b"s" * 70_000, "new": None}
    store.put_snapshot(old, ref="runs/a")
    store.put_snapshot(new, ref="runs/a")
    diff = store.diff("runs/a~1", "runs/a")
    assert diff.values == (
        ValueChange("int", "changed", 1, 2),
        ValueChange("bool", "changed", 1, True),
        ValueChange("big", "changed", "(bytes, 70,000 bytes)", "(bytes, 70,000 bytes)"),
        ValueChange("new", "added", None, None),
        ValueChange("gone", "removed", "x", None),
    )
    assert diff.unchanged_values == 3
    assert diff.tensors == ()
