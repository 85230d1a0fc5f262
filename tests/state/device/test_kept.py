"""Asynchronous saves of tensors on a device that have not changed: they are not copied, and what is published is the state at the call."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.write.dedup import DedupIndex
from tensorstore_ck.errors import CaptureChangedError
from tensorstore_ck.log.block_index import Location
from tensorstore_ck.state.device import capture_proofs, kept_tensors
from tensorstore_ck.state.device.device_blocks import StartedIds
from tensorstore_ck.state.device.kept_tensors import KeptSource
from tests.effort import effort
from tests.session.group.pool import make_store
from tests.state.device.late_device import LateDevice, put_tensors_on

REF = "runs/kept"
ELEMENTS = 90_000
State = dict[str, torch.Tensor]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    found = LateDevice()
    put_tensors_on(found, monkeypatch)
    monkeypatch.setattr(kept_tensors, "MIN_KEPT_BYTES", 1)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    make_store(tmp_path, block_bytes=64 << 10)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache", codec="fast") as opened:
        yield opened


class Job:
    """A state with bf16 weights and their fp32 masters, integers, a strided tensor, and one with numbers that are not finite."""

    def __init__(self, device: LateDevice, store: tsck.Store) -> None:
        draw = torch.Generator().manual_seed(1)
        master = torch.randn(400, 500, generator=draw)
        self.state = {
            "weights": master.bfloat16(),
            "master": master,
            "numbers": torch.randint(0, 1000, (ELEMENTS,), generator=draw),
            "strided": torch.randn(300, 400, generator=draw).t(),
            "mask": torch.full((ELEMENTS,), -torch.inf),
            "small": torch.zeros(10),
        }
        self.device = device
        self.store = store
        self.step = 0

    def copied(self, batches: int) -> list[str]:
        """The large tensors that were copied since the device had that many batches."""
        starts = {copy.tensor.data_ptr() for batch in self.device.batches[batches:] for copy in batch.copies}
        return [name for name, tensor in self.state.items() if tensor.data_ptr() in starts and name != "small"]

    def put(self) -> tuple[tsck.PendingSnapshot, State, list[str]]:
        """A save, the values at its call, and what it copied."""
        self.step += 1
        expected, batches = {name: tensor.clone() for name, tensor in self.state.items()}, len(self.device.batches)
        pending = self.store.put_snapshot_async(self.state, ref=REF, step=self.step, unchanged="ok")
        return pending, expected, self.copied(batches)

    def change_all(self) -> None:
        for tensor in self.state.values():
            tensor[0] += 1

    def assert_stored(self, step: int, expected: State) -> None:
        found = self.store.checkout(f"{REF}@{step}")
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.fixture
def job(device: LateDevice, store: tsck.Store) -> Job:
    """After two saves of the same values."""
    made = Job(device, store)
    for _ in range(2):
        made.put()[0].wait()
    return made


def test_what_did_not_change_is_neither_copied_nor_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a sample of weights and masters, which may have changed by then."""
    reads: list[int] = []
    monkeypatch.setattr(KeptSource, "read", lambda source, start, stop: reads.append(start))
    for _ in range(6):  # each one draws a sample
        pending, _, copied = job.put()
        assert copied == ["mask"]
        pending.wait()
    pending, expected, copied = job.put()
    assert copied == ["mask"]
    job.change_all()
    pending.wait()
    assert reads == []
    job.assert_stored(job.step, expected)


def test_only_tensors_that_changed_are_copied(job: Job) -> None:
    job.state["numbers"][77] += 1
    pending, expected, copied = job.put()
    assert copied == ["numbers", "mask"]
    job.change_all()
    pending.wait()
    job.assert_stored(3, expected)
    assert job.put()[2] == [name for name in job.state if name != "small"]


def test_a_call_waits_only_for_tensors_that_may_not_have_changed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[StartedIds] = []
    wait = kept_tensors.blocks_by_tensor

    def noted(started: StartedIds) -> Any:
        waits.append(started)
        return wait(started)

    monkeypatch.setattr(kept_tensors, "blocks_by_tensor", noted)
    for _ in range(3):
        job.change_all()
        pending, _, copied = job.put()
        assert len(copied) == len(job.state) - 1
        pending.wait()
    assert len(waits) == 1


def test_a_tensor_is_checked_for_numbers_that_are_not_finite_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(capture_proofs, "_is_finite", lambda source, spec: checked.append(spec.name))
    job.put()[0].wait()
    job.put()[0].wait()
    assert checked == []


def test_roots_are_those_of_copies(device: LateDevice, store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of numbers that are not finite in the sample, which each save draws, is in the metadata."""
    roots = []
    for least_bytes in (1, 1 << 40):
        monkeypatch.setattr(kept_tensors, "MIN_KEPT_BYTES", least_bytes)
        job, ref = Job(device, store), f"least/{least_bytes}"
        roots.append([store.put_snapshot_async(job.state, ref=ref, step=step, unchanged="ok").wait().root for step in range(4)])
    assert roots[0] == roots[1]


@pytest.mark.parametrize("has_changed", [False, True])
def test_blocks_that_the_store_has_lost(job: Job, monkeypatch: pytest.MonkeyPatch, has_changed: bool) -> None:
    """They are read from the device after all; if they have changed by then, nothing is published."""

    def lose(*_: object) -> dict[Digest, Location]:
        if has_changed:
            job.change_all()
        return {}

    with monkeypatch.context() as patch:
        patch.setattr(DedupIndex, "find", lose)
        pending, expected, copied = job.put()
        assert copied == ["mask"]
        if has_changed:
            with pytest.raises(CaptureChangedError, match="was not copied from its device"):
                pending.wait()
        else:
            pending.wait()
    assert len(job.store.log(REF)) == 3 - has_changed
    if not has_changed:
        job.assert_stored(3, expected)
    pending, expected, copied = job.put()
    pending.wait()
    job.assert_stored(4, expected)


def test_what_is_staged_is_copied(device: LateDevice, store: tsck.Store, tmp_path: Path) -> None:
    """A staging disk need not have what the store has."""
    with tsck.open(store.url, cache_dir=tmp_path / "cache", staging=tmp_path / "stage") as staged:
        job = Job(device, staged)
        for _ in range(3):
            pending, _, copied = job.put()
            pending.wait()
            assert copied == [name for name in job.state if name != "small"]


def test_a_few_bytes_are_copied(device: LateDevice, store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tensors, "MIN_KEPT_BYTES", 256 << 20)
    job = Job(device, store)
    for _ in range(3):
        pending, _, copied = job.put()
        pending.wait()
        assert copied == [name for name in job.state if name != "small"]


@pytest.mark.parametrize("seed", range(effort(2, 60)))
def test_any_changes_between_and_during_saves(device: LateDevice, store: tsck.Store, seed: int) -> None:
    job, draw = Job(device, store), random.Random(seed)
    saves, copies = [], 0
    for _ in range(14):
        if draw.random() < 0.4:
            job.state[draw.choice(sorted(job.state.keys() - {"small"}))][draw.randrange(300)] += 1
        pending, expected, copied = job.put()
        saves.append((job.step, pending, expected))
        copies += len(copied)
        if draw.random() < 0.5:
            pending.wait()
        if draw.random() < 0.3:
            job.change_all()
    for step, pending, expected in saves:
        pending.wait()
        job.assert_stored(step, expected)
    assert copies < 14 * 5
