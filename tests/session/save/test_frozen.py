"""Tensors that are said to be frozen: neither copied nor read again, and found out when they change."""

import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.common.threads import ProcessLock
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.errors import BackendUnavailableError, FrozenChangedError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.session.save import context
from tensorstore_ck.session.save.frozen_tensors import VERIFY_EVERY, FrozenTensors
from tensorstore_ck.state import capture
from tensorstore_ck.state.capture_copy import memory_key
from tensorstore_ck.state.select import Selection
from tests.effort import PATIENCE_SECONDS, effort
from tests.session.save.places import MIB, Scene, scene

BASE = 3_000_000
HEAD = 100_000
EVERYTHING = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1)


def new_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    base = torch.randint(0, 256, (BASE,), dtype=torch.uint8, generator=generator)
    return {"base": {"w": base, "small": torch.arange(4)}, "head": torch.zeros(HEAD, dtype=torch.uint8)}


def put(place: Scene, state: dict[str, Any], step: int, **options: Any) -> tsck.PendingSnapshot:
    state["head"].fill_(step)
    return place.store.put_snapshot_async(state, ref="job", step=step, **{"frozen": ["base.*"], **options})


def hashed_bytes(place: Scene, pending: tsck.PendingSnapshot) -> int:
    pending.wait()
    return next(int(event.fields["hashed_bytes"]) for event in place.told("published") if event.put == pending.id)


def is_read(place: Scene, pending: tsck.PendingSnapshot) -> bool:
    """Whether the frozen tensor went through the hash."""
    return hashed_bytes(place, pending) >= BASE


def check(place: Scene, state: dict[str, Any], step: int) -> None:
    found = place.store.checkout(f"job@{step}")
    assert torch.equal(found["base"]["w"], state["base"]["w"])
    assert torch.equal(found["base"]["small"], state["base"]["small"])
    assert torch.equal(found["head"], torch.full((HEAD,), step, dtype=torch.uint8))


def test_they_are_not_copied_so_a_state_fits_only_because_of_them() -> None:
    with scene(host_memory_bytes=4 * MIB) as place:
        state = new_state()
        for step, globs in ((1, []), (2, ["bass.*"]), (3, ["base.*"]), (4, ["*"])):
            put(place, state, step, frozen=globs).wait()
            check(place, state, step)
        copied = [(event.fields["captured_bytes"], event.fields["frozen_bytes"]) for event in place.told("captured")]
        frozen = BASE + state["base"]["small"].nbytes
        assert [each[1] for each in copied] == [0, 0, frozen, frozen + HEAD]
        assert all(int(each[0]) >= BASE + HEAD for each in copied[:2])
        assert HEAD <= int(copied[2][0]) < HEAD + 1000
        assert copied[3][0] == 0
    with scene(host_memory_bytes=2 * MIB) as place:
        pendings = [put(place, state, step) for step in range(3)]
        assert [pending.wait().step for pending in pendings] == [0, 1, 2]
        with pytest.raises(tsck.errors.NoSpaceError, match="frozen="):
            put(place, state, 3, frozen=[])


def test_two_threads_may_be_the_first_to_name_some(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    class Slow(FrozenTensors):
        def __init__(self) -> None:
            super().__init__()
            both.wait(PATIENCE_SECONDS)

    with scene() as place:
        states = {ref: {ref: torch.zeros(BASE, dtype=torch.uint8)} for ref in ("a", "b")}

        def save(ref: str) -> tsck.PendingSnapshot:
            pending = place.store.put_snapshot_async(states[ref], ref=ref, frozen=[ref])
            pending.wait()
            return pending

        with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
            patch.setattr(context, "FrozenTensors", Slow)
            assert len([*threads.map(save, states)]) == 2
        assert [is_read(place, save(ref)) for ref in states] == [False, False]


def test_they_are_read_at_the_first_save_and_each_tenth_after() -> None:
    """Also where several are in flight, and by saves that are waited for."""
    assert VERIFY_EVERY == 10
    with scene() as place:
        state = new_state()
        stop = place.gate.stop("put parts/")
        pendings = [put(place, state, step) for step in range(12)]
        stop.let_go()
        assert [pending.step for pending in pendings if is_read(place, pending)] == [0, VERIFY_EVERY]
        for step in range(12):
            check(place, state, step)
    with scene() as place:
        read = []
        for step in range(22):
            place.store.put_snapshot(state, ref="job", step=step, frozen=["base.*"])
            if int(place.told("published")[-1].fields["hashed_bytes"]) >= BASE:
                read.append(step)
        assert read == [0, VERIFY_EVERY, 2 * VERIFY_EVERY]
        with place.other() as other:
            assert torch.equal(other.checkout("job@7")["base"]["w"], state["base"]["w"])


# --- when they change -------------------------------------------------------------------------------------------------


def test_a_change_is_found_and_nothing_is_published(place: Scene) -> None:
    state = new_state()
    for step in range(VERIFY_EVERY):
        put(place, state, step).wait()
    before = state["base"]["w"].clone()
    state["base"]["w"][BASE // 2] ^= 1
    for step in (10, 11):  # not once: at each save, as long as it is said to be frozen
        with pytest.raises(FrozenChangedError, match=r"base\.w was declared frozen, but has changed .* the 9 snapshots since") as raised:
            put(place, state, step).wait()
        assert raised.value.object_id == "base.w"
    assert place.steps() == list(range(VERIFY_EVERY))
    assert torch.equal(place.store.checkout("job")["base"]["w"], before)
    put(place, state, 12, frozen=["base.small"]).wait()
    check(place, state, 12)


def test_what_was_trained_in_between_is_read(place: Scene) -> None:
    """Frozen, then not, then frozen again, at the same address."""
    state = new_state()
    put(place, state, 1).wait()
    state["base"]["w"].fill_(9)
    put(place, state, 2, frozen=[]).wait()
    state["base"]["w"].fill_(8)
    put(place, state, 3).wait()
    check(place, state, 3)


def test_a_change_while_they_are_read_spoils_no_block(place: Scene) -> None:
    """What is stored under a block's id has that id, whatever the owner does: all later snapshots share it."""
    state = new_state()
    before = state["base"]["w"].clone()
    for _ in range(2):  # header and layout
        place.gate.stop("append").let_go()
    stop = place.gate.stop("append")  # after the hash
    pending = put(place, state, 0)
    stop.await_reached()
    state["base"]["w"].fill_(7)
    stop.let_go()
    found = place.store.checkout(pending.wait().root)["base"]["w"]
    assert torch.equal(found, before)
    assert place.store.fsck(read_data=True).ok


# --- when what is known of them no longer counts ----------------------------------------------------------------------


def test_a_restore_forgets(place: Scene) -> None:
    state = new_state()
    put(place, state, 0).wait()
    assert not is_read(place, put(place, state, 1))
    state["base"]["w"].fill_(9)
    place.store.checkout("job@0", into=state)
    state["base"]["w"][0] ^= 1  # the job goes on from other weights
    assert is_read(place, put(place, state, 2))
    check(place, state, 2)


def test_a_save_during_a_restore_teaches_nothing(place: Scene) -> None:
    """It reads tensors that the restore has not filled yet."""
    state, other = new_state(), new_state()
    other["base"]["w"].fill_(9)
    place.store.put_snapshot(other, ref="other", step=0)
    stop = place.gate.stop("read packs/")
    restore = threading.Thread(target=place.store.checkout, args=("other",), kwargs={"into": state})
    restore.start()
    stop.await_reached()
    put(place, state, 0).wait()
    stop.let_go()
    restore.join()
    assert is_read(place, put(place, state, 1))
    check(place, state, 1)


class NoticedLock(ProcessLock):
    """Sets `waits` when a thread must wait for it."""

    waits = threading.Event()

    @property
    def here(self) -> "NoticedLock":
        return self

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waits.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def in_another_thread(call: Callable[[], object]) -> threading.Thread:
    """Returns when the thread waits for the lock."""
    ended = list[bool]()

    def run() -> None:
        call()
        ended.append(True)
        NoticedLock.waits.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert NoticedLock.waits.wait(PATIENCE_SECONDS)
    assert not ended, "it changed what is known while a save used it"
    return thread


def in_a_signal_handler(call: Callable[[], object]) -> None:
    call()


@pytest.mark.parametrize("run", [in_another_thread, in_a_signal_handler])
@pytest.mark.parametrize("how", ["restore", "save"])
def test_what_is_forgotten_during_a_save_stays_forgotten(how: str, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore, or a save that freezes nothing, while the tensors of another state are marked."""
    monkeypatch.setattr("tensorstore_ck.session.save.frozen_tensors.ProcessLock", NoticedLock, raising=False)
    monkeypatch.setattr(NoticedLock, "waits", threading.Event())
    fitting, started = Selection.fitting, list[threading.Thread | None]()
    with scene() as place:
        state = new_state()
        put(place, state, 0).wait()
        calls = {
            "restore": lambda: place.store.checkout("job@0", into=state),
            "save": lambda: place.store.put_snapshot(state, ref="job", step=1, unchanged="ok"),
        }

        def interrupted(self: Selection, names: list[str]) -> list[int]:
            monkeypatch.setattr(Selection, "fitting", fitting)
            started.append(run(calls[how]))
            return fitting(self, names)

        monkeypatch.setattr(Selection, "fitting", interrupted)
        place.store.put_snapshot({"more": torch.ones(4)}, ref="other", step=0, frozen=["more"], unchanged="ok")
        for thread in filter(None, started):
            thread.join()
        state["base"]["w"].fill_(9)
        assert is_read(place, put(place, state, 2))
        check(place, state, 2)


def test_blocks_that_gc_freed_are_written_again(place: Scene) -> None:
    state = new_state()
    put(place, state, 0).wait()
    place.store.forget("job")
    place.store.gc(EVERYTHING)
    place.store.gc(EVERYTHING)
    assert is_read(place, put(place, state, 1))
    assert not is_read(place, put(place, state, 2))
    check(place, state, 2)
    assert place.store.fsck(read_data=True).ok


def test_another_ref_other_memory_and_another_shape(place: Scene) -> None:
    state = new_state()
    put(place, state, 0).wait()
    place.store.put_snapshot(state, ref="other", step=1, frozen=["base.*"])
    assert torch.equal(place.store.checkout("other")["base"]["w"], state["base"]["w"])
    put(place, state, 2).wait()
    for step, other in ((3, state["base"]["w"] + 1), (4, torch.arange(BASE + MIB * 8, dtype=torch.int64).to(torch.uint8))):
        state["base"]["w"] = other
        assert is_read(place, put(place, state, step))
        check(place, state, step)


def test_a_save_that_fails_learns_nothing_wrong(place: Scene) -> None:
    state = new_state()
    place.gate.fail("put parts/", BackendUnavailableError("injected"))
    with pytest.raises(BackendUnavailableError):
        put(place, state, 0).wait()
    for step in (1, 2):
        put(place, state, step).wait()
        check(place, state, step)
    assert place.store.fsck(read_data=True).ok


# --- by columns and by name -------------------------------------------------------------------------------------------


class ByName:
    """What `FrozenTensors` does, in a dict: a name -> its place, and an object that stands for what is known."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[object, object]] = {}

    def mark(self, captured: CapturedState, globs: list[str], scope: bytes) -> dict[int, object]:
        frozen = {}
        for number, spec in enumerate(captured.layout.tensors):
            if not (globs and Selection(globs).fits(spec.name)):
                self.known.pop(spec.name, None)
                continue
            place = (scope, spec, *memory_key(captured.sources[number]))
            if spec.name not in self.known or self.known[spec.name][0] != place:
                self.known[spec.name] = place, object()
            frozen[number] = self.known[spec.name][1]
        return frozen


def test_random_saves_know_what_a_dict_of_names_would_know() -> None:
    """Tensors that move, change their shape or dtype, are frozen or not; states with other names, in turns; each twice or more."""
    for seed in range(effort(150, 5_000)):
        rng = random.Random(seed)
        by_columns, by_name, same = FrozenTensors(), ByName(), dict[int, object]()
        kept: list[object] = []
        tensors = [torch.ones(4) for _ in range(3)]
        names, globs, scope = list[str](), list[str](), b""
        saves: list[tuple[list[str], list[str], bytes, list[torch.Tensor]]] = []
        for _ in range(24):
            if rng.random() < 0.5:
                position = rng.randrange(3)
                base = (
                    torch.ones(4) if rng.random() < 0.2 else torch.as_strided(tensors[position].detach().view(torch.float32), (4,), (1,), 0)
                )
                row, odd = base.view(1, 4), base.as_strided((1, 4), (7, 1))  # the same tensor
                tensors[position] = rng.choice((base, base.view(torch.int32), base.view(2, 2), base[::2], base[1::2], row, odd))
                kept.append(base)
            if not names or rng.random() < 0.3:
                names = rng.choice((["a.1", "a.2", "b.1"], ["a.1", "b.2"], ["c.1", "a.2"], ["a.2", "a.1"]))
                globs[:] = rng.choice(([], ["*"], ["a.*"], ["b.1"], ["nothing"]))
                scope = rng.choice((b"", b"group"))
            elif rng.random() < 0.3:
                names, globs[:], scope, tensors = rng.choice(saves[-3:])
            saves.append((names, [*globs], scope, [*tensors]))
            state = dict(zip(names, tensors, strict=False))
            captured = capture(state)
            found, expected = by_columns.mark(captured, globs, scope).frozen, by_name.mark(captured, globs, scope)
            assert sorted(found) == sorted(expected), seed
            for number, known in expected.items():
                assert same.setdefault(id(known), found[number]) is found[number], seed
            assert len({id(known) for known in same.values()}) == len(same), seed
            kept += [captured, *expected.values(), *found.values()]  # no address or id is used again
            if rng.random() < 0.1:
                by_columns.forget()
                by_name.known.clear()


def test_a_state_in_turns_with_another_keeps_what_is_known_of_it(place: Scene) -> None:
    state, other = new_state(), {"more": torch.ones(4)}
    read = []
    for step in range(3):
        read.append(is_read(place, put(place, state, step)))
        place.store.put_snapshot(other, ref="other", step=step, frozen=["more"], unchanged="ok")
    assert read == [True, False, False]


def test_the_memory_of_what_is_no_longer_frozen_is_freed(place: Scene) -> None:
    state = new_state()
    put(place, state, 0).wait()
    memory = weakref.ref(state["base"]["w"].untyped_storage())
    put(place, {"base": {"w": torch.ones(3)}, "head": state["head"]}, 1).wait()
    del state
    assert memory() is None
