"""The ids that a GPU computes are the host's, and what it finds unchanged does not cross the bus."""

import random
import threading
import warnings
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.common.ids import block_id
from tensorstore_ck.state.device.kernel import GROUP_BYTES, BlockHasher, CudaHasher, hasher_of
from tensorstore_ck.state.device.side_streams import DeviceArrival, DeviceCopy, SideStreams
from tensorstore_ck.state.device.waited_copies import PieceCopy, WaitedCopies
from tests.gpu.kinds import clones, different, kinds, random_tensor

REF = "runs/ids"
MIB = 1 << 20


@pytest.fixture
def hasher(cuda: torch.device) -> BlockHasher:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = hasher_of(torch.empty(1, device=cuda).device)
    assert found is not None
    return found


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy to the host."""
    sizes: list[int] = []
    fetch = WaitedCopies.fetch

    def counted(self: WaitedCopies, pieces: Sequence[PieceCopy]) -> memoryview:
        sizes.append(sum(piece.size_bytes for piece in pieces))
        return fetch(self, pieces)

    monkeypatch.setattr(WaitedCopies, "fetch", counted)
    return sizes


def test_ids_of_every_shape_of_the_tree(cuda: torch.device, hasher: BlockHasher) -> None:
    draw = random.Random(1)
    memory = torch.randint(0, 256, (64 * MIB,), dtype=torch.uint8, device=cuda)
    data = memory.cpu().numpy()
    sizes = [*range(1, 200), *range(1000, 1100), *(chunks * 1024 + more for chunks in range(1, 260) for more in (-1, 0, 1))]
    sizes += [groups * GROUP_BYTES + more for groups in range(1, 70) for more in (-1025, -1, 0, 1, 64, 1025)]
    sizes += [draw.randrange(1, 8 * MIB) for _ in range(100)]
    starts = [draw.randrange(len(data) - size) & -draw.choice((1, 2, 4, 16)) for size in sizes]
    found = hasher.start(np.array(starts, np.int64) + memory.data_ptr(), np.array(sizes, np.int64)).wait()
    wrong = [
        (start, size)
        for start, size, digest in zip(starts, sizes, found, strict=True)
        if digest.tobytes() != block_id(data[start : start + size].data)
    ]
    assert wrong == []


def test_a_launch_that_writes_nothing_is_noticed(cuda: torch.device, hasher: BlockHasher, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(MIB, dtype=torch.uint8, device=cuda)
    addresses, sizes = np.array([memory.data_ptr()], np.int64), np.array([MIB], np.int64)
    hasher.start(addresses, sizes).wait()
    monkeypatch.setattr(hasher, "_merge_groups", lambda **_: None)
    with pytest.raises(RuntimeError, match="did not write all ids"):
        hasher.start(addresses, sizes).wait()


def test_roots_are_those_of_the_host(cuda: torch.device, hasher: BlockHasher, store: tsck.Store) -> None:
    state = {name: value for name, value in kinds(cuda).items() if isinstance(value, torch.Tensor) and name not in ("base", "alias")}
    draw = random.Random(2)
    for step in range(6):
        host = {name: value.detach().resolve_conj().resolve_neg().cpu().contiguous() for name, value in state.items()}
        dense = {name: value.detach().resolve_conj().resolve_neg().contiguous() for name, value in state.items()}
        roots = [
            store.put_snapshot(each, ref=ref, step=step, unchanged="ok").root
            for ref, each in (("host", host), ("dense", dense), (REF, state))
        ]
        assert roots[0] == roots[1]
        expected = {name: value for name, value in clones(state).items() if name != ".parameter"}
        assert different({name: value for name, value in store.checkout(REF).items() if name != "parameter"}, expected) == []
        for name in draw.sample(["float32", "large", "odd", "bool", "transposed", "channels_last", "bfloat16"], 2):
            with torch.no_grad():
                flat = state[name].t().reshape(-1) if name == "transposed" else state[name]
                flat[draw.randrange(len(flat))] = 1


def test_unchanged_blocks_stay_on_the_device(cuda: torch.device, hasher: BlockHasher, store: tsck.Store, fetched: list[int]) -> None:
    state = {f"w{number}": random_tensor(cuda, 16 * MIB, seed=number) for number in range(8)}
    state["strided"] = random_tensor(cuda, 2000, 3000).t()
    store.put_snapshot(state, ref=REF, step=1)
    total = sum(fetched)
    fetched.clear()
    store.put_snapshot(state, ref=REF, step=2, unchanged="ok")
    assert sum(fetched) <= total // 1000
    state["w3"][5 * MIB] += 1
    store.put_snapshot(state, ref=REF, step=3)
    assert 4 * MIB <= sum(fetched) <= 9 * MIB
    assert different(store.checkout(REF), clones(state)) == []


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that each asynchronous save copies."""
    sizes: list[int] = []
    start = SideStreams.start

    def counted(self: SideStreams, copies: Sequence[DeviceCopy]) -> DeviceArrival:
        sizes.append(sum(copy.tensor.nbytes for copy in copies))
        return start(self, copies)

    monkeypatch.setattr(SideStreams, "start", counted)
    return sizes


def test_an_asynchronous_save_copies_only_tensors_that_changed(
    cuda: torch.device, hasher: BlockHasher, store: tsck.Store, copied: list[int], fetched: list[int]
) -> None:
    """Also if all of them are changed right after the call."""
    state = {f"w{number}": random_tensor(cuda, 16 * MIB, seed=number) for number in range(8)}
    state["strided"] = random_tensor(cuda, 2000, 3000).t()
    saves = []
    for step in range(6):
        if step >= 4:
            state[f"w{step}"][5 * MIB] += 1
        copied.clear()
        fetched.clear()
        expected = {name: tensor.clone() for name, tensor in state.items()}
        pending = store.put_snapshot_async(state, ref=REF, step=step, unchanged="ok")
        saves.append((step, expected))
        if step == 5:
            for tensor in state.values():
                tensor.add_(1)
        pending.wait()
        if step >= 2:
            assert sum(copied) == max(step - 3, 0) * 64 * MIB  # what has changed is copied once more, then it is known
            assert sum(fetched) < MIB
    for step, expected in saves:
        assert different(store.checkout(f"{REF}@{step}"), clones(expected)) == []


def test_a_hasher_is_made_in_a_thread(cuda: torch.device) -> None:
    """Of a process whose first save is asynchronous."""
    made = []
    thread = threading.Thread(target=lambda: made.append(CudaHasher(torch.empty(1, device=cuda).device)))
    thread.start()
    thread.join()
    assert len(made) == 1
