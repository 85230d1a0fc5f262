"""A torn capture is impossible: what is stored is the state of the moment of the call, whatever happens to it afterwards.

The worker is held until the state has been spoilt, so that nothing here depends on who is faster.
"""

import copy
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.state.byte_sources import memory_at
from tests.session.save.places import Scene, check, put_beside, state_of
from tests.state.fake import assert_same
from tests.state.samples import DTYPES, tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # deepcopy
EVERYTHING = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1)
Losses = namedtuple("Losses", "train valid")


@contextmanager
def held(place: Scene) -> Iterator[None]:
    """What it contains is not inspected before the end."""
    stop, _ = place.hold(0, ref="blocker", expect=tsck.ANY, size_bytes=100)
    yield
    stop.let_go()


def ruin(value: Any) -> None:
    """Changes everything that can be changed: all memory, and all containers."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        memory_at(storage.data_ptr(), storage.nbytes())[:] = b"\xa5" * storage.nbytes()
    elif isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        if value.flags.writeable:
            np.lib.stride_tricks.as_strided(value.reshape(-1).view(np.uint8), (value.nbytes,), (1,))[...] = 0xA5
    elif isinstance(value, bytearray):
        value[:] = b"\xa5" * (len(value) + 3)
    elif isinstance(value, list | tuple):
        for item in value:
            ruin(item)
    elif isinstance(value, dict):
        ruin(list(value.values()))
    if isinstance(value, OrderedDict):
        vars(value).clear()
    if isinstance(value, list | dict | set):
        value.clear()
    if isinstance(value, list):
        value.append("ruined")


def every_kind(mapped: Path) -> dict[Any, Any]:
    base = torch.arange(10_000, dtype=torch.float32)
    numbers = np.arange(6000, dtype=np.float64).reshape(60, 100)
    moments: OrderedDict[str, Any] = OrderedDict(first=torch.randn(40, 50), second=torch.randn(40, 50))
    moments._metadata = {"version": [1, 2]}  # type: ignore[attr-defined]
    return {
        "dense": torch.randn(300, 400),
        "parameter": torch.nn.Parameter(torch.randn(64, 64)),
        "transposed": torch.randn(100, 200).t(),
        "every third": torch.arange(9000)[::3],
        "expanded": torch.randn(1, 80).expand(50, 80),
        "conjugate": torch.randn(30, 30, dtype=torch.complex64).conj(),
        "views of one": [base, base[100:200], base.view(100, 100)[:, 7]],
        "the same": (base, base),
        "nothing": torch.empty(0, 3),
        "one": torch.tensor(7),
        "dtypes": {str(dtype): tensor(dtype, (7, 5), seed) for seed, dtype in enumerate(DTYPES)},
        "array": numbers,
        "mapped": np.memmap(mapped, np.int32, "w+", shape=(5000,)),
        "backwards": numbers[::-1, ::2],
        "columns": np.asfortranarray(numbers),
        "big-endian": numbers.astype(">f4"),
        "moments": moments,
        "losses": Losses(train=[1.0, 2.0], valid=[[3.0], "x"]),
        "seen": {1, 2, (3, 4)},
        "counts": Counter(a=3),
        "groups": defaultdict(list, a=[1, 2, None]),
        "small buffer": bytearray(b"abc"),
        "large buffer": bytearray(range(256)) * 1000,
        "large list": list(range(50_000)),
        "mixed": [1, None, {"deep": [[], {}, "text"]}],
        3: {"step": 5},
    }


def test_a_state_of_every_kind_that_is_ruined_at_once(place: Scene, tmp_path: Path) -> None:
    state = every_kind(tmp_path / "mapped")
    state["mapped"][:] = np.arange(5000)
    expected = copy.deepcopy({**state, "mapped": np.array(state["mapped"])})
    with held(place):
        pending = place.store.put_snapshot_async(state, ref="job")
        ruin(state)
    pending.wait()
    assert_same(place.store.checkout("job"), expected)


def test_metadata_and_metrics_are_those_of_the_call(place: Scene) -> None:
    metrics, metadata = {"loss": 0.5}, {"lr": [1, 2]}
    with held(place):
        pending = place.store.put_snapshot_async({}, ref="job", metrics=metrics, metadata=metadata)
        metrics["loss"] = 9.0
        metadata["lr"].append(3)
    snapshot = pending.wait()
    assert snapshot.metrics == {"loss": 0.5}
    assert place.store.show("job").metadata == {"lr": [1, 2]}


# --- many in flight ---------------------------------------------------------------------------------------------------


def test_one_state_that_is_trained_on_with_six_snapshots_in_flight(place: Scene) -> None:
    model: dict[str, Any] = {"w": torch.zeros(300, 300), "views": torch.zeros(5000)[::2], "losses": [], "rng": bytearray(8), "step": 0}
    expected, pendings = [], []
    with held(place):
        for step in range(1, 7):
            model["w"] += step
            model["views"] -= step
            model["losses"].append(float(step))
            model["rng"][step % 8] = step
            model["step"] = step
            expected.append(copy.deepcopy(model))
            pendings.append(place.store.put_snapshot_async(model, ref="job", step=step))
            assert pendings[-1].captured.reached()
        ruin(model)
        assert [pending.step for pending in place.store.pending()] == [0, 1, 2, 3, 4, 5, 6]
    snapshots = [pending.wait() for pending in pendings]
    for step, snapshot in enumerate(snapshots, start=1):
        assert_same(place.store.checkout(snapshot.root), expected[step - 1])
    require_chain(place, snapshots)


def require_chain(place: Scene, snapshots: list[tsck.Snapshot]) -> None:
    """Published in this order, each on top of the one before; the log shows it to everybody."""
    assert [after.parent for after in snapshots[1:]] == [before.root for before in snapshots[:-1]]
    entries = [snapshot.entry for snapshot in snapshots]
    assert entries == sorted(entries)
    with place.other() as other:
        assert [found.root for found in reversed(other.log("job"))] == [snapshot.root for snapshot in snapshots]


def test_what_gc_frees_meanwhile_is_written_again_from_the_capture(place: Scene) -> None:
    put_beside(place.store, 1).wait()
    stop, pending = place.hold(2, at="put snapshots/")
    with place.other() as other:
        for _ in range(2):
            other.gc(EVERYTHING)
    stop.let_go()
    pending.wait()
    check(place.store, 1)
    check(place.store, 2)
    assert place.store.fsck(read_data=True).ok


def test_a_restore_into_a_state_that_is_in_flight(place: Scene) -> None:
    """The memory that is filled is what the save has captured: it was copied."""
    put_beside(place.store, 1).wait()
    state = state_of(2)
    pending = place.store.put_snapshot_async(state, ref="job", step=2)
    place.store.checkout("job@1", into=state)
    assert pending.done(), "a restore waits for earlier saves"
    assert torch.equal(state["w"], state_of(1)["w"])
    check(place.store, 2)
