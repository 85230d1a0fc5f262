"""Copies of an asynchronous save that go on beside the next passes: what is published is the state at the call, or nothing."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.common.ids import Digest, block_id
from tensorstore_ck.engine.write import pack_writer
from tensorstore_ck.errors import CaptureChangedError, InvalidOptionError
from tensorstore_ck.state import arena
from tensorstore_ck.state.device.kernel import BlockHasher, Ids, Numbers, StartedHash
from tests.effort import effort
from tests.group_of_one import group_of_one
from tests.session.group.pool import make_store
from tests.state.device.late_device import LateDevice, put_tensors_on

REF = "runs/overlap"
WIDTH = 260
State = dict[str, torch.Tensor]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    found = LateDevice()
    put_tensors_on(found, monkeypatch)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    make_store(tmp_path, block_bytes=64 << 10)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as opened:
        yield opened


@pytest.fixture
def cuda_seems_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of optimizers don't ask the device, which a build of torch for CUDA does."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda _: None, raising=False)


class Job:
    """A model with a large parameter, a small one, and a large buffer that forward changes."""

    def __init__(self, store: tsck.Store) -> None:
        torch.manual_seed(0)
        self.store = store
        self.model = nn.Linear(WIDTH, WIDTH)
        self.seen = torch.zeros(WIDTH, WIDTH)
        self.model.register_buffer("seen", self.seen)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.training = tsck.TrainingState(model=self.model, optimizer=self.optimizer)
        self.steps = 0

    def forward_and_backward(self) -> None:
        self.seen += 1
        self.model(torch.randn(2, WIDTH)).square().mean().backward()

    def step(self) -> None:
        self.forward_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def put(self, **options: Any) -> tuple[tsck.PendingSnapshot, State]:
        expected = self.values()
        return self.training.put_async(self.store, ref=REF, step=self.steps, unchanged="ok", **options), expected

    def values(self) -> State:
        moments = {f"optimizer.{name}": each for name, each in self.optimizer.state[self.model.weight].items()}
        return {name: each.detach().clone() for name, each in {**self.model.state_dict(), **moments}.items()}

    def trusted(self) -> "Job":
        """After a save that tried the optimizer out."""
        self.step()
        self.put()[0].wait()
        self.step()
        return self


@pytest.fixture
def job(device: LateDevice, store: tsck.Store) -> Job:
    return Job(store).trusted()


def assert_stored(store: tsck.Store, address: str, expected: State) -> None:
    found = store.checkout(address)
    for name, value in expected.items():
        moment = name.removeprefix("optimizer.")
        stored = found["model"][name] if moment == name else found["optimizer"]["state"]["weight"][moment]
        assert torch.equal(stored, value), name


def test_only_the_step_waits_for_the_copy_of_what_it_changes(device: LateDevice, store: tsck.Store, job: Job) -> None:
    pending, expected = job.put()
    (batch,) = device.late
    assert {copy.tensor.data_ptr() for copy in batch.copies} == {
        each.data_ptr() for each in (job.model.weight, *(job.optimizer.state[job.model.weight][name] for name in ("exp_avg", "exp_avg_sq")))
    }
    job.forward_and_backward()
    assert device.late == [batch]
    job.optimizer.step()
    assert device.late == []
    pending.wait()
    assert_stored(store, REF, expected)


@pytest.mark.parametrize("gradients", [False, True])
def test_gradients_and_buffers_are_copied_at_once(device: LateDevice, store: tsck.Store, job: Job, gradients: bool) -> None:
    job.forward_and_backward()
    expected = job.model.weight.grad.clone()  # type: ignore[union-attr]
    pending, values = job.put(gradients=gradients)
    assert len(device.late) == 1
    job.forward_and_backward()
    device.run()
    pending.wait()
    assert_stored(store, REF, values)
    if gradients:
        assert torch.equal(store.checkout(REF)["rank"]["gradients"]["weight"], expected)


def test_a_loaded_optimizer_waits_for_the_copy(device: LateDevice, store: tsck.Store, job: Job) -> None:
    pending, expected = job.put()
    job.optimizer.load_state_dict({**job.optimizer.state_dict(), "state": {}})
    assert device.late == []
    pending.wait()
    assert_stored(store, REF, {name: value for name, value in expected.items() if not name.startswith("optimizer")})


CHANGES: dict[str, Callable[[Job], object]] = {
    "a parameter": lambda job: job.model.weight.data.add_(1),
    "a moment": lambda job: job.optimizer.state[job.model.weight]["exp_avg"].mul_(2),
    "one element": lambda job: job.model.weight.data[7, 9].add_(1),
    "loaded": lambda job: job.model.load_state_dict({name: each + 1 for name, each in job.model.state_dict().items()}),
    "a step of another optimizer": lambda job: torch.optim.SGD([job.model.weight], 0.1).step(lambda: job.model(torch.ones(WIDTH)).sum()),
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_else_changes_a_tensor_is_named_and_nothing_is_published(device: LateDevice, store: tsck.Store, job: Job, how: str) -> None:
    job.forward_and_backward()
    pending, _ = job.put()
    CHANGES[how](job)
    device.run()
    with pytest.raises(CaptureChangedError, match=r"weight.*between the call of the save and the next step of the optimizer"):
        pending.wait()
    assert len(store.log(REF)) == 1
    for _ in range(2):  # and from now on the copies are made at once
        job.step()
        pending, expected = job.put()
        assert device.late == []
        CHANGES[how](job)
        pending.wait()
        assert_stored(store, REF, expected)


def test_a_loop_that_changes_parameters_itself_is_never_overlapped(device: LateDevice, store: tsck.Store) -> None:
    """As an embedding with max_norm does in forward."""
    job = Job(store)
    for _ in range(4):
        job.step()
        pending, expected = job.put()
        assert device.late == []
        with torch.no_grad():
            job.model.weight.clamp_(-0.1, 0.1)
        pending.wait()
        assert_stored(store, REF, expected)


def test_steps_that_call_no_hook_are_never_overlapped(device: LateDevice, store: tsck.Store, job: Job) -> None:
    """As the replays of a graph, also of an optimizer that called its hooks before."""
    job.put()
    device.run()
    for _ in range(3):
        type(job.optimizer).step.__wrapped__(job.optimizer)  # type: ignore[attr-defined]
        pending, expected = job.put()
        assert device.late == []
        type(job.optimizer).step.__wrapped__(job.optimizer)  # type: ignore[attr-defined]
        pending.wait()
        assert_stored(store, REF, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_is_never_overlapped(device: LateDevice, store: tsck.Store) -> None:
    """Its hooks are compiled, too."""
    job = Job(store)
    job.step()
    job.put()[0].wait()
    step = torch.compile(job.optimizer.step, backend="eager")
    for _ in range(3):
        job.forward_and_backward()
        step()
        pending, expected = job.put()
        assert device.late == []
        pending.wait()
        assert_stored(store, REF, expected)


@pytest.mark.parametrize("options", [{"changed_by": ()}, {"verify_capture": 0}], ids=str)
def test_it_can_be_turned_off(device: LateDevice, job: Job, options: dict[str, Any]) -> None:
    pending, _ = job.put(**options)
    assert device.late == []
    pending.wait()


def test_an_optimizer_in_a_group(device: LateDevice, store: tsck.Store, job: Job) -> None:
    with group_of_one():
        for _ in range(2):
            pending, expected = job.put(group=dist.group.WORLD)
            assert len(device.late) == 1
            job.step()
            pending.wait()
            assert_stored(store, REF, expected)
        pending, _ = job.put(group=dist.group.WORLD)
        job.model.weight.data.add_(1)
        device.run()
        with pytest.raises(CaptureChangedError):
            pending.wait()


@pytest.mark.parametrize("changed_by", ["adam", np.zeros(0), np.zeros(3)])
def test_what_is_no_optimizer_is_refused(store: tsck.Store, changed_by: Any) -> None:
    with pytest.raises(InvalidOptionError, match="changed_by must be a torch optimizer"):
        store.put_snapshot_async({}, ref=REF, changed_by=changed_by)


def test_a_closed_store_leaves_no_hooks(device: LateDevice, job: Job) -> None:
    assert job.optimizer._optimizer_step_pre_hooks
    job.store.close()
    assert not job.optimizer._optimizer_step_pre_hooks


def test_blocks_that_did_not_change_are_not_hashed_by_the_host(
    device: LateDevice, store: tsck.Store, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending, _ = job.put()
    device.run()
    pending.wait()
    hashed: list[int] = []

    def counted(data: memoryview) -> Digest:
        hashed.append(len(data))
        return block_id(data)

    monkeypatch.setattr(pack_writer, "block_id", counted)
    pending, expected = job.put()
    device.run()
    pending.wait()
    assert sum(hashed) < 20_000  # the layout, and what is small
    assert_stored(store, REF, expected)


def test_a_copy_that_differs_from_the_ids_of_the_call_is_not_published(
    device: LateDevice, store: tsck.Store, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the ids before and after are the same: as if a copy went wrong."""
    pending, _ = job.put()
    (batch,) = device.late

    def spoil() -> None:
        batch.copies[0].target.view(-1)[5:6].add_(1)

    batch.then.append(spoil)
    device.run()
    with pytest.raises(CaptureChangedError):
        pending.wait()
    assert len(store.log(REF)) == 1


@pytest.mark.parametrize("seed", range(effort(2, 60)))
def test_any_order_of_work(device: LateDevice, store: tsck.Store, seed: int) -> None:
    """Steps, saves, late copies and foreign changes: each snapshot is the state of its call, and only foreign changes lose one."""
    job, draw = Job(store), random.Random(seed)
    saves: list[tuple[int, tsck.PendingSnapshot, State]] = []
    has_foreign, overlapped = False, 0
    job.step()
    for _ in range(25):
        action = draw.choice(["step", "step", "passes", "put", "put", "late copies", "foreign"])
        if action == "step":
            job.step()
        elif action == "passes":
            job.forward_and_backward()
        elif action == "late copies":
            device.run()
        elif action == "put":
            job.steps += 1
            with suppress(CaptureChangedError):  # of an earlier save
                saves.append((job.steps, *job.put()))
            overlapped += bool(device.late)
        elif seed % 3 == 0:
            has_foreign = True
            job.model.weight.data[draw.randrange(WIDTH)].add_(1)
    device.run()
    for step, pending, expected in saves:
        try:
            pending.wait()
        except CaptureChangedError:
            assert has_foreign
        else:
            assert_stored(store, f"{REF}@{step}", expected)
    assert overlapped or has_foreign


class OpenHashes:
    """A `BlockHasher` that knows how many of its results are waited for at once."""

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._open = self.most = 0

    def start(self, addresses: Numbers, sizes_bytes: Numbers) -> StartedHash:
        self._open += 1
        self.most = max(self.most, self._open)
        started = self._hasher.start(addresses, sizes_bytes)
        wait = started.wait

        def counted() -> Ids:
            self._open -= 1
            return wait()

        started.wait = counted  # type: ignore[method-assign]
        return started


@pytest.mark.usefixtures("cuda_seems_available")
def test_what_is_prepared_is_there_for_the_first_saves(device: LateDevice, store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for two copies is allocated in a thread, and the optimizer is tried out before the first save."""
    allocated: list[str] = []
    new_pages = arena._new_pages

    def noted(size_bytes: int, *, pinned: bool) -> Any:
        allocated.append(threading.current_thread().name)
        return new_pages(size_bytes, pinned=False)

    monkeypatch.setattr(arena, "_new_pages", noted)
    job = Job(store)
    job.step()
    job.training.prepare(store)
    store.session.queue.wait_idle()
    for _ in range(2):
        job.step()
        pending, expected = job.put()
        assert len(device.late) == 1
        device.run()
        pending.wait()
        assert_stored(store, REF, expected)
    store.close()
    assert allocated == ["tsck-pin"] * 2


@pytest.mark.usefixtures("cuda_seems_available")
def test_a_state_is_hashed_twice_at_a_time_when_it_is_prepared(
    device: LateDevice, store: tsck.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before and after a copy, so that torch has memory for both."""
    monkeypatch.setattr(arena.Arena, "prepare", lambda *_: None)
    hashes = OpenHashes(device.hasher)
    monkeypatch.setattr(device, "hasher", hashes)
    job = Job(store)
    job.step()
    job.training.prepare(store)
    store.close()
    assert hashes.most == 2
