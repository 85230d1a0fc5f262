"""A follower's tensors are the newest version of a branch, whole, for the bytes that changed."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.events import Event
from tests.effort import PATIENCE_SECONDS
from tests.feed.versions import REF, NotedFaults, State, copy_of, equal, first_state, follower, save, step_of, train, update, zeros
from tests.gc.stores import AT_ONCE, Clock, open_store, sizes


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


def stored_bytes(backend: MemoryBackend) -> int:
    return sum(info.size_bytes for info in backend.list(""))


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_each_version_in_turn(backend: MemoryBackend, dtype: torch.dtype, delta: bool) -> None:
    trainer, state = open_store(backend), first_state(dtype)
    root = save(trainer, state, 0, delta=delta).root
    mine = zeros(state)
    feed = follower(backend).follow(REF, into=mine)
    for step in range(1, 4):
        polled = feed.poll()
        assert step_of(feed) == (None if step == 1 else step - 2)
        swapped = feed.swap()
        assert swapped is not None
        assert swapped == polled == feed.version
        assert (swapped.root, swapped.step) == (root, step - 1)
        assert equal(mine, state)
        assert update(feed) is None
        train(state, step, 0.01 if step < 3 else 1.0)
        root = save(trainer, state, step, delta=delta).root


def test_it_reads_what_was_published_and_a_late_one_the_differences_in_one_pass(backend: MemoryBackend) -> None:
    trainer, state = open_store(backend), first_state(rows=1024)
    save(trainer, state, 0)
    faults, late_faults, own_faults = NotedFaults(), NotedFaults(), NotedFaults()
    mine, late, own = zeros(state), zeros(state), copy_of(state)
    feed, late_feed = (follower(backend, each).follow(REF, into=into) for each, into in ((faults, mine), (late_faults, late)))
    for each in (feed, late_feed):
        update(each)
    whole = stored_bytes(backend)
    published = []
    for step in range(1, 5):
        before = stored_bytes(backend)
        train(state, step, 0.005)
        save(trainer, state, step)
        published.append(stored_bytes(backend) - before)
        faults.read_bytes = 0
        update(feed)
        assert equal(mine, state)
        assert faults.read_bytes <= 1.2 * published[-1] < 0.05 * whole
    late_faults.read_bytes, late_faults.noted[:] = 0, []
    update(late_feed)
    assert equal(late, state)
    assert late_faults.read_bytes <= 1.2 * sum(published)
    own_feed = follower(backend, own_faults).follow(REF, into=own)  # weights that came in another way are the base as well
    update(own_feed)
    assert equal(own, state)
    assert own_faults.read_bytes <= 1.2 * sum(published) + 100_000  # and the log


def test_what_somebody_changed_is_noticed_at_the_next_difference_and_read_whole(backend: MemoryBackend) -> None:
    trainer, state = open_store(backend), first_state()
    save(trainer, state, 0)
    mine = zeros(state)
    feed = follower(backend).follow(REF, into=mine)
    update(feed)
    mine["model"]["layers.1"][5, 5] += 1
    train(state, 1)
    save(trainer, state, 1)
    update(feed)
    assert equal(mine, state)
    for name in ("layers.1", "layers.2", "bias"):
        mine["model"][name].zero_()
    state["model"]["layers.1"][0, 0] += 1  # the one difference shows it, and all are hashed
    save(trainer, state, 2)
    update(feed)
    assert equal(mine, state)
    mine["model"]["layers.2"].zero_()
    assert feed.poll() is None
    assert feed.poll(verify=True) == feed.version
    feed.swap()
    assert equal(mine, state)


def test_a_changed_copy_of_a_tied_tensor_is_noticed(backend: MemoryBackend) -> None:
    trainer, state = open_store(backend), first_state()
    state["model"]["head"] = state["model"]["layers.1"]
    save(trainer, state, 0)
    mine = zeros(state)
    feed = follower(backend).follow(REF, into=mine)
    update(feed)
    for name in ("head", "layers.2"):
        mine["model"][name].zero_()
    state["model"]["layers.1"][0, 0] += 1
    save(trainer, state, 1)
    update(feed)
    assert equal(mine, state)


def test_transposed_converted_and_tied_tensors(backend: MemoryBackend) -> None:
    trainer, state = open_store(backend), first_state(torch.float32)
    state["model"]["tied"] = state["model"]["layers.0"]
    save(trainer, state, 0)
    turned = {
        "model": {
            name: tensor.t().contiguous().t() if tensor.ndim > 1 else tensor.clone() for name, tensor in zeros(state)["model"].items()
        }
    }
    half = {"model": {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in state["model"].items()}}
    parameter = torch.nn.Parameter(half["model"]["layers.1"])
    half["model"]["layers.1"] = parameter
    store = follower(backend)
    feeds = store.follow(REF, into=turned), store.follow(REF, into=half, dtype=torch.bfloat16)
    for step in range(3):
        for feed in feeds:
            update(feed)
        assert equal(turned, state)
        assert equal(half, {"model": {name: tensor.bfloat16() for name, tensor in state["model"].items()}})
        assert state["model"]["tied"] is state["model"]["layers.0"]
        for name, tensor in state["model"].items():
            if name != "tied":
                tensor += torch.rand(tensor.shape) < (0.01 if step else 0.5)
        save(trainer, state, step + 1)
    assert parameter.requires_grad
    assert parameter._version > 0


def test_tensors_that_a_later_version_ties_or_unties_or_stores_in_another_dtype(backend: MemoryBackend) -> None:
    trainer, state = open_store(backend), first_state()
    mine = {"model": {name: tensor.float() for name, tensor in zeros(state)["model"].items()}}
    feed = follower(backend).follow(REF, into=mine, dtype=torch.float32)
    first, second = state["model"]["layers.0"], state["model"]["layers.1"]
    for step, pair in enumerate([(first, second), (first, first), (first, second), (second, second), (first.view(torch.float16), second)]):
        state["model"] |= {"layers.0": pair[0], "layers.1": pair[1]}
        save(trainer, state, step)
        update(feed)
        assert equal(mine, {"model": {name: tensor.float() for name, tensor in state["model"].items()}})


def test_a_module_with_and_without_the_trainers_prefix(backend: MemoryBackend) -> None:
    module, other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    trainer = open_store(backend)
    trainer.put_snapshot({"model": module.state_dict(), "optimizer": {"step": 3}}, ref=REF, step=0)
    trainer.put_snapshot(module.state_dict(), ref="bare", step=0)
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        (REF, {"select": "model.*"}),
        (REF, {"select": ["model.*"], "rename": {"model": ""}}),
        (REF, {}),
        ("bare", {}),
    )
    for ref, options in cases:
        torch.nn.init.zeros_(other.weight)
        update(follower(backend).follow(ref, into=other, **options))
        assert equal({"model": other.state_dict()}, {"model": module.state_dict()})
        other.extra = torch.nn.Parameter(torch.ones(1))
        with pytest.raises(tsck.MismatchError, match=r"1 missing in the snapshot: .*extra"):
            follower(backend).follow(ref, into=other, **options).poll()
        del other.extra


def move_back(trainer: tsck.Store) -> None:
    trainer.reset(REF, f"{REF}@0")


@pytest.mark.parametrize("staged", [False, True])
def test_a_rewound_branch_is_followed_back(backend: MemoryBackend, staged: bool) -> None:
    trainer, state = open_store(backend), first_state()
    save(trainer, state, 0)
    old = copy_of(state)
    mine = zeros(state)
    feed = follower(backend).follow(REF, into=mine)
    update(feed)
    train(state, 1)
    save(trainer, state, 1)
    feed.poll()
    if not staged:
        feed.swap()
        assert equal(mine, state)
    move_back(trainer)
    assert (feed.poll() is None) == staged
    feed.swap()
    assert equal(mine, old)
    assert step_of(feed) == 0


def with_other_shape(state: State) -> None:
    state["model"]["layers.0"] = torch.zeros(65, 128, dtype=torch.bfloat16)


def with_other_dtype(state: State) -> None:
    state["model"]["layers.2"] = state["model"]["layers.2"].float()


def with_other_names(state: State) -> None:
    state["model"] = {name.replace("layers", "blocks"): tensor for name, tensor in state["model"].items()}


def with_more(state: State) -> None:
    state["model"]["layers.3"] = torch.zeros(64, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize("change", [with_other_shape, with_other_dtype, with_other_names, with_more])
def test_what_does_not_fit_is_an_error_and_the_next_that_fits_is_taken(backend: MemoryBackend, change: Callable[[State], None]) -> None:
    trainer, state = open_store(backend), first_state()
    save(trainer, state, 0)
    mine, other = zeros(state), copy_of(state)
    feed = follower(backend).follow(REF, into=mine)
    update(feed)
    change(other)
    train(other, 1)
    save(trainer, other, 1)
    with pytest.raises(tsck.errors.MismatchError, match=r"runs/rl, step 1, root [0-9a-f]{16} does not fit `into`, which stays as it is"):
        feed.poll()
    assert feed.swap() is None
    assert step_of(feed) == 0
    assert equal(mine, state)
    train(state, 2)
    save(trainer, state, 2)
    update(feed)
    assert equal(mine, state)


def test_a_removed_a_missing_and_a_marked_version(backend: MemoryBackend) -> None:
    trainer, state, mine = open_store(backend), first_state(), zeros(first_state())
    feed = follower(backend).follow(REF, into=mine)
    with pytest.raises(tsck.errors.NotFoundError):
        feed.poll()
    save(trainer, state, 0)
    update(feed)
    train(state, 1)
    bad = save(trainer, state, 1)
    trainer.mark(bad.root, reason="loss is NaN")
    with pytest.raises(tsck.errors.SnapshotMarkedBadError):
        feed.poll()
    trainer.forget(REF)
    with pytest.raises(tsck.errors.NotFoundError):
        feed.poll()
    assert step_of(feed) == 0
    assert equal(mine, first_state())


def test_a_follower_that_fell_out_of_retention_takes_the_newest(backend: MemoryBackend) -> None:
    trainer, state = open_store(backend), first_state()
    trainer.set_policy(REF, keep_last=1)
    save(trainer, state, 0)
    mine = zeros(state)
    feed = follower(backend).follow(REF, into=mine)
    update(feed)
    for step in range(1, 4):
        train(state, step, 1.0)
        save(trainer, state, step)
        trainer.gc(AT_ONCE)
    update(feed)
    assert equal(mine, state)


def test_followers_write_nothing_and_are_told_apart(backend: MemoryBackend) -> None:
    trainer, state = open_store(backend), first_state()
    save(trainer, state, 0)
    faults = NotedFaults()
    store = follower(backend, faults)
    one, two = zeros(state), zeros(state)
    first, second = store.follow(REF, into=one), follower(backend).follow(REF, into=two)
    before = sizes(backend)
    update(first)
    assert sizes(backend) == before
    assert not [what for what in faults.noted if what.partition(" ")[0] not in ("get", "read", "list", "size", "folders")]
    train(state, 1)
    save(trainer, state, 1)
    update(second)
    assert equal(two, state)
    assert not equal(one, state)
    update(first)
    assert equal(one, state)


def test_several_processes_agree_on_a_version(backend: MemoryBackend) -> None:
    trainer, state = open_store(backend), first_state()
    roots = []
    versions = []
    for step in range(3):
        roots.append(save(trainer, state, step).root)
        versions.append(copy_of(state))
        train(state, step)
    mine = zeros(state)
    feed = follower(backend).follow(REF, into=mine)
    for number in (1, 0, 2):
        feed.poll(roots[number])
        feed.swap()
        assert equal(mine, versions[number])
        assert step_of(feed) == number


def test_wait_and_close(backend: MemoryBackend) -> None:
    trainer, state = open_store(backend), first_state()
    save(trainer, state, 0)
    faults = NotedFaults()
    store, mine = follower(backend, faults), zeros(state)
    with store.follow(REF, into=mine, poll_seconds=0.001) as feed:
        assert feed.wait(0) is not None
        feed.swap()
        assert feed.wait(0) is None
        faults.mode, faults.at, faults.persistent = "unavailable", 1, True
        with pytest.raises(tsck.errors.BackendUnavailableError):
            feed.wait(0)
        ended: list[object] = []
        waiting = threading.Thread(target=lambda: ended.append(feed.wait()))
        waiting.start()
        faults.mode = ""
        train(state, 1)
        save(trainer, state, 1)
        waiting.join(PATIENCE_SECONDS)
        assert [version.step for version in ended] == [1]  # type: ignore[attr-defined]
        feed.swap()
        assert equal(mine, state)
        waiting = threading.Thread(target=lambda: ended.append(feed.wait()))
        waiting.start()
    waiting.join(PATIENCE_SECONDS)
    assert ended[1:] == [None]
    assert equal(mine, state)
    with pytest.raises(tsck.errors.InputError, match="closed"):
        feed.poll()
    assert feed.wait() is None  # as when it is closed just before the next poll
    with pytest.raises(tsck.errors.InvalidOptionError):
        store.follow(REF, into=mine, poll_seconds=0)


def test_events_and_age() -> None:
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    trainer, state = open_store(backend, clock=clock), first_state()
    save(trainer, state, 0)
    store = open_store(backend, clock=clock)
    seen: list[Event] = []
    store.on_event(seen.append)
    feed = store.follow(REF, into=zeros(state))
    clock.advance(5)
    feed.poll()
    clock.advance(2)
    feed.swap()
    assert feed.version is not None
    assert feed.version.age_seconds == 7
    fetched, swapped = seen
    assert (fetched.kind, fetched.ref, fetched.step, fetched.fields["age_seconds"]) == ("fetched", REF, 0, 5)
    assert fetched.fields["changed_bytes"] == sum(tensor.nbytes for tensor in state["model"].values() if tensor.nbytes > 4096)
    assert (swapped.kind, swapped.fields["root"], swapped.fields["age_seconds"]) == ("swapped", feed.version.root, 7)


@pytest.mark.timeout(PATIENCE_SECONDS)
def test_a_callback_may_use_the_feed(backend: MemoryBackend) -> None:
    trainer, state = open_store(backend), first_state()
    mine: Any = zeros(state)
    save(trainer, state, 0)
    store = follower(backend)
    feed = store.follow(REF, into=mine)

    def take_next(event: Event) -> None:
        if event.kind == "fetched":
            feed.swap()
        elif event.step == 0:
            train(state, 1)
            save(trainer, state, 1)
            feed.poll()
        else:
            feed.close()

    store.on_event(take_next)
    feed.poll()
    assert feed.version is not None
    assert feed.version.step == 1
    assert equal(mine, state)
    with pytest.raises(tsck.errors.InputError, match="closed"):
        feed.poll()


def test_tensors_that_cannot_be_followed(backend: MemoryBackend) -> None:
    trainer, state = open_store(backend), first_state()
    save(trainer, state, 0)
    store = follower(backend)
    for into, error in (
        ({"model": {name: tensor.to("meta") for name, tensor in state["model"].items()}}, tsck.errors.UnsupportedValueError),
        ({"model": {name: torch._neg_view(tensor.clone()) for name, tensor in state["model"].items()}}, tsck.errors.UnsupportedValueError),
        ({"model": {"layers.0": 3}}, tsck.errors.MismatchError),
        (None, tsck.errors.MismatchError),
        ({"model": {name: tensor.float().numpy() for name, tensor in state["model"].items()}}, tsck.errors.MismatchError),
    ):
        with pytest.raises(error):
            store.follow(REF, into=into).poll()


def test_a_read_only_store_in_a_folder(tmp_path: Path) -> None:
    state = first_state()
    mine: Any = zeros(state)
    with tsck.open(tmp_path / "store", create=True) as trainer, tsck.open(tmp_path / "store", read_only=True) as store:
        feed = store.follow(REF, into=mine)
        for step in range(3):
            train(state, step)
            save(trainer, state, step)
            update(feed)
            assert equal(mine, state)


def test_a_forged_layout_is_not_kept_for_later_versions(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the id of the layout that it pretends to be."""
    state = first_state()
    save(open_store(backend), state, 0)
    feed = follower(backend).follow(REF, into=copy_of(state))
    with monkeypatch.context() as patch:
        patch.setattr(SnapshotReader, "_blob", lambda reader, _: bytes(100) + reader.part.layout_id)
        with pytest.raises(CorruptObjectError):
            feed.poll()
    assert update(feed)


def test_a_difference_to_what_the_tensors_are_is_not_compared_with_them(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, state = open_store(backend), first_state()
    del state["model"]["bias"]  # its bytes come with every part
    state["model"] |= {"tied": state["model"]["layers.0"], "bytes": torch.randint(0, 255, (64, 128), dtype=torch.uint8)}
    state["model"]["large"] = torch.randn(700_000).bfloat16()  # blocks of several pieces
    save(trainer, state, 0)
    mine = zeros(state)
    mine["model"]["layers.1"] = mine["model"]["layers.1"].t().contiguous().t()
    feed = follower(backend).follow(REF, into=mine)
    update(feed)
    monkeypatch.setattr("tensorstore_ck.feed.followed_tensor.find_changes", None)
    for step in range(1, 3):
        for name in ("layers.0", "layers.1", "layers.2", "bytes", "large"):
            state["model"][name].view(-1)[step::97] += 1
        save(trainer, state, step)
        update(feed)
        assert equal(mine, state)


def test_what_a_dropped_version_showed_to_be_changed_is_read_with_the_next_one(tmp_path: Path) -> None:
    state = first_state()
    with tsck.open(tmp_path, create=True) as trainer, tsck.open(tmp_path, read_only=True) as reader:
        first, mine = save(trainer, state, 0), zeros(state)
        feed = reader.follow(REF, into=mine)
        update(feed)
        mine["model"]["layers.2"].view(-1)[:8] += 1
        train(state, 1)
        save(trainer, state, 1)
        feed.poll()
        state = trainer.checkout(first.root)
        trainer.reset(REF, to=first.root)
        state["model"]["layers.0"] += 1
        save(trainer, state, 2)
        update(feed)
        assert equal(mine, state)
