"""Tensors that are said to be frozen: neither copied nor read again, and found out when they change."""

from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import BackendUnavailableError, FrozenChangedError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.session.save.frozen_tensors import VERIFY_EVERY
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


def test_they_are_not_copied() -> None:
    with scene() as place:
        state = new_state()
        put(place, state, 1, frozen=[]).wait()
        put(place, state, 2).wait()
        copied = [(event.fields["captured_bytes"], event.fields["frozen_bytes"]) for event in place.told("captured")]
        frozen = BASE + state["base"]["small"].nbytes
        assert copied[0][1] == 0
        assert int(copied[0][0]) >= BASE + HEAD
        assert HEAD <= int(copied[1][0]) < HEAD + 1000
        assert copied[1][1] == frozen
        check(place, state, 2)


def test_a_state_that_fits_only_because_of_them() -> None:
    with scene(host_memory_bytes=2 * MIB) as place:
        state = new_state()
        pendings = [put(place, state, step) for step in range(3)]
        assert [pending.wait().step for pending in pendings] == [0, 1, 2]
        with pytest.raises(tsck.errors.NoSpaceError, match="frozen="):
            put(place, state, 3, frozen=[])


def test_they_are_read_at_the_first_save_and_each_tenth_after() -> None:
    with scene() as place:
        state = new_state()
        read = [step for step in range(25) if is_read(place, put(place, state, step))]
        assert read == [0, VERIFY_EVERY, 2 * VERIFY_EVERY]
        assert VERIFY_EVERY == 10
        for step in (0, 9, 10, 24):
            check(place, state, step)


def test_with_several_in_flight_too() -> None:
    with scene() as place:
        state = new_state()
        stop = place.gate.stop("put parts/")
        pendings = [put(place, state, step) for step in range(12)]
        stop.let_go()
        assert [pending.step for pending in pendings if is_read(place, pending)] == [0, VERIFY_EVERY]
        for pending in pendings:
            check_root = place.store.checkout(pending.wait().root)
            assert torch.equal(check_root["head"], torch.full((HEAD,), pending.step or 0, dtype=torch.uint8))


def test_with_synchronous_saves() -> None:
    with scene() as place:
        state = new_state()
        read = []
        for step in range(13):
            place.store.put_snapshot(state, ref="job", step=step, frozen=["base.*"])
            if int(place.told("published")[-1].fields["hashed_bytes"]) >= BASE:
                read.append(step)
        assert read == [0, VERIFY_EVERY]
        with place.other() as other:
            assert torch.equal(other.checkout("job@7")["base"]["w"], state["base"]["w"])


# --- when they change -------------------------------------------------------------------------------------------------


def test_a_change_is_found_and_nothing_is_published() -> None:
    with scene() as place:
        state = new_state()
        for step in range(VERIFY_EVERY):
            put(place, state, step).wait()
        before = state["base"]["w"].clone()
        state["base"]["w"][BASE // 2] ^= 1
        for step in (10, 11):  # not once: at each save, as long as it is said to be frozen
            with pytest.raises(
                FrozenChangedError, match=r"base\.w was declared frozen, but has changed .* the 9 snapshots since"
            ) as raised:
                put(place, state, step).wait()
            assert raised.value.object_id == "base.w"
        assert place.steps() == list(range(VERIFY_EVERY))
        assert torch.equal(place.store.checkout("job")["base"]["w"], before)
        put(place, state, 12, frozen=["base.small"]).wait()
        check(place, state, 12)


def test_what_was_trained_in_between_is_read() -> None:
    """Frozen, then not, then frozen again, at the same address."""
    with scene() as place:
        state = new_state()
        put(place, state, 1).wait()
        state["base"]["w"].fill_(9)
        put(place, state, 2, frozen=[]).wait()
        state["base"]["w"].fill_(8)
        put(place, state, 3).wait()
        check(place, state, 3)


def test_a_change_that_nobody_waits_for_is_raised_by_the_next_save() -> None:
    with scene() as place:
        state = new_state()
        for step in range(VERIFY_EVERY):
            put(place, state, step)
        place.store.drain()  # a tensor that changes before its first save has read it is saved as it is then
        state["base"]["w"][0] ^= 1
        put(place, state, 10)
        place.store.session.queue.wait_idle()
        with pytest.raises(FrozenChangedError):
            put(place, state, 11)
        put(place, state, 12, frozen=[]).wait()
        check(place, state, 12)


def test_a_change_while_they_are_read_spoils_no_block() -> None:
    """What is stored under a block's id has that id, whatever the owner does: all later snapshots share it."""
    with scene() as place:
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


def test_a_restore_forgets() -> None:
    with scene() as place:
        state = new_state()
        put(place, state, 0).wait()
        assert not is_read(place, put(place, state, 1))
        state["base"]["w"].fill_(9)
        place.store.checkout("job@0", into=state)
        state["base"]["w"][0] ^= 1  # the job goes on from other weights
        assert is_read(place, put(place, state, 2))
        check(place, state, 2)


def test_blocks_that_gc_freed_are_written_again() -> None:
    with scene() as place:
        state = new_state()
        put(place, state, 0).wait()
        place.store.forget("job")
        place.store.gc(EVERYTHING)
        place.store.gc(EVERYTHING)
        assert is_read(place, put(place, state, 1))
        assert not is_read(place, put(place, state, 2))
        check(place, state, 2)
        assert place.store.fsck(read_data=True).ok


def test_another_ref_and_another_shape() -> None:
    with scene() as place:
        state = new_state()
        put(place, state, 0).wait()
        place.store.put_snapshot(state, ref="other", step=1, frozen=["base.*"])
        assert torch.equal(place.store.checkout("other")["base"]["w"], state["base"]["w"])
        put(place, state, 2).wait()
        state["base"]["w"] = torch.arange(BASE + MIB * 8, dtype=torch.int64).to(torch.uint8)
        assert is_read(place, put(place, state, 3))
        check(place, state, 3)


def test_a_save_that_fails_learns_nothing_wrong() -> None:
    with scene() as place:
        state = new_state()
        place.gate.fail("put parts/", BackendUnavailableError("injected"))
        with pytest.raises(BackendUnavailableError):
            put(place, state, 0).wait()
        for step in (1, 2):
            put(place, state, step).wait()
            check(place, state, step)
        assert place.store.fsck(read_data=True).ok


# --- what can be said -------------------------------------------------------------------------------------------------


def test_globs_that_fit_nothing_change_nothing() -> None:
    with scene() as place:
        state = new_state()
        put(place, state, 1, frozen=["bass.*"]).wait()
        (captured,) = place.told("captured")
        assert captured.fields["frozen_bytes"] == 0
        assert int(captured.fields["captured_bytes"]) >= BASE
        check(place, state, 1)


def test_everything_can_be_frozen() -> None:
    with scene() as place:
        state = new_state()
        for step in range(2):
            state["head"].fill_(0)
            pending = place.store.put_snapshot_async(state, ref="job", step=step, frozen=["*"])
            pending.wait()
        assert [event.fields["captured_bytes"] for event in place.told("captured")] == [0, 0]
        assert hashed_bytes(place, pending) < 10_000
        assert torch.equal(place.store.checkout("job@1")["base"]["w"], state["base"]["w"])
