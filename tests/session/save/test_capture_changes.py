"""Tensors that are changed while they are captured, as a thread of the training does that goes on too early: named, and not published."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.engine.write import sampled_checks
from tensorstore_ck.engine.write.sampled_checks import SAMPLE_SHARE, STRIDE_BYTES, pieces
from tensorstore_ck.errors import CaptureChangedError, InvalidOptionError
from tensorstore_ck.format.codec import compiled
from tensorstore_ck.state import capture_copy
from tests.session.group.pool import Pool, make_store
from tests.session.save import rank_side
from tests.session.save.places import MIB, Scene

LARGE = 10 * MIB
"""Of a tensor of which a piece is always looked at."""


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((LARGE // 4,), float(step)), "b": torch.full((7,), float(step))}, "n": torch.tensor(step)}


@pytest.fixture
def during_put(place: Scene, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Has a thread do something in the middle of the next save that is waited for: its blocks are read, and not yet durable."""

    def arrange(work: Callable[[], object]) -> None:
        real = place.gate.call
        done: list[str] = []

        def call(what: str, *args: Any, **options: Any) -> Any:
            if what.startswith("close") and not done:
                done.append(what)
                in_a_thread(work)
            return real(what, *args, **options)

        monkeypatch.setattr(place.gate, "call", call)

    return arrange


@pytest.fixture
def during_capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """The same while the next asynchronous save copies its state."""

    def arrange(work: Callable[[], object]) -> None:
        real = capture_copy._OtherSources.copy_strided

        def copy_strided(self: capture_copy._OtherSources) -> None:
            real(self)
            monkeypatch.undo()
            in_a_thread(work)

        monkeypatch.setattr(capture_copy._OtherSources, "copy_strided", copy_strided)

    return arrange


CHANGES: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("model.w", lambda state: state["model"]["w"].add_(1)),
    ("model.b", lambda state: state["model"]["b"].__setitem__(3, 9)),
    ("n", lambda state: state["n"].add_(1)),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_while_it_is_saved(place: Scene, during_put: Any, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    state = state_of(1)
    place.store.put_snapshot(state, ref="job", step=1)
    state["model"]["w"].add_(1)
    during_put(lambda: change(state))
    with pytest.raises(CaptureChangedError, match=f"^{name} changed while being captured.*nothing was published") as raised:
        place.store.put_snapshot(state, ref="job", step=2)
    assert raised.value.object_id == name
    assert place.steps() == [1]
    place.store.put_snapshot(state, ref="job", step=2)
    assert place.steps() == [1, 2]


@pytest.mark.parametrize(("has_kernel", "name", "change"), [(compiled.HAS_KERNEL, *each) for each in CHANGES] + [(False, *CHANGES[1])])
def test_while_it_is_copied(
    place: Scene, during_capture: Any, has_kernel: bool, name: str, change: Callable[[dict[str, Any]], object]
) -> None:
    state = state_of(1)

    def work() -> None:
        change(state)
        patch.setattr(compiled, "HAS_KERNEL", has_kernel)

    during_capture(work)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CaptureChangedError, match=f"^{name} changed while being captured"):
        place.store.put_snapshot_async(state, ref="job", step=1)
    assert place.in_use_bytes == 0
    place.store.put_snapshot_async(state, ref="job", step=1).wait()
    assert place.steps() == [1]


def test_once_it_is_copied_it_may_change(place: Scene) -> None:
    state = state_of(1)
    stop = place.gate.stop("close")
    pending = place.store.put_snapshot_async(state, ref="job", step=1, verify_capture=1.0)
    stop.await_reached()
    for _, change in CHANGES:
        change(state)
    stop.let_go()
    pending.wait()
    assert torch.equal(place.store.checkout("job")["model"]["w"], state_of(1)["model"]["w"])


def test_tensors_that_are_not_one_piece_of_memory(place: Scene, during_put: Any, during_capture: Any) -> None:
    for number, arrange in enumerate((during_put, during_capture)):
        put = (place.store.put_snapshot, place.store.put_snapshot_async)[number]
        state: dict[str, Any] = {
            "strided": torch.ones(1000, 3000)[:, ::2],
            "array": np.ones((700, 800))[:, :-1],
            "few": torch.ones(6, 6)[:, ::2],
        }
        for name in ("strided", "array", "few"):
            arrange(lambda name=name, state=state: np.asarray(state[name]).__setitem__(slice(None), 5))
            with pytest.raises(CaptureChangedError, match=name):
                put(state, ref=f"job-{number}", step=1, verify_capture=1.0)


def test_one_element_is_found_where_all_is_compared(place: Scene, during_put: Any, during_capture: Any) -> None:
    for at in (0, 1_234_567, LARGE // 4 - 1):
        for arrange, put in ((during_put, place.store.put_snapshot), (during_capture, place.store.put_snapshot_async)):
            state = state_of(1)
            arrange(lambda state=state, at=at: state["model"]["w"].__setitem__(at, 7))
            with pytest.raises(CaptureChangedError, match=r"model\.w"):
                put(state, ref="job", step=1, verify_capture=1.0)


def test_the_share_that_is_compared(place: Scene, during_put: Any) -> None:
    state = state_of(1)
    during_put(lambda: [change(state) for _, change in CHANGES])
    place.store.put_snapshot(state, ref="job", step=1, verify_capture=0)
    for wrong in (-0.1, 1.5, True, "all"):
        with pytest.raises(InvalidOptionError, match="verify_capture must be a share"):
            place.store.put_snapshot(state, ref="job", step=2, verify_capture=wrong)  # type: ignore[arg-type]


def test_at_most_three_are_named(place: Scene, during_put: Any) -> None:
    state = {f"t{number}": torch.zeros(5) for number in range(6)}
    during_put(lambda: [each.add_(1) for each in state.values()])
    with pytest.raises(CaptureChangedError, match=r"^t0, t1, t2 and 3 more changed"):
        place.store.put_snapshot(state, ref="job")


def test_on_one_of_many_ranks(pool: Pool, tmp_path: Path) -> None:
    make_store(tmp_path, block_bytes=64 << 10)
    pool.run(rank_side.begin, str(tmp_path), 2, [None, None], ranks=2)
    endings = pool.run(rank_side.put_torn, 1, 1, ranks=2)
    assert all("model.w changed while being captured" in text for _, text in endings), endings
    assert {kind for kind, _ in pool.run(rank_side.put_torn, 2, None, ranks=2)} == {"published"}
    pool.run(rank_side.end, ranks=2)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "look") as store:
        assert [snapshot.step for snapshot in store.log("job")] == [2]


# --- the sample -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [SAMPLE_SHARE, 0.3, 1.0])
def test_a_sample_is_a_piece_of_each_stride_however_a_tensor_is_cut(share: float) -> None:
    size = 5 * STRIDE_BYTES + 4096
    for tensor, turn in ((0, 1), (7, 12345), (100_000, 2**32 - 1)):
        whole = list(pieces(tensor, 0, size, share, turn))
        taken = np.zeros(size, bool)
        for start, stop in whole:
            assert start % 16 == stop % 16 == 0
            assert not taken[start:stop].any()
            taken[start:stop] = True
        assert taken.sum() / size == pytest.approx(share, rel=0.21)
        assert share < 1 or taken.all()
        assert taken.reshape(-1, 16).all(axis=1).sum() * 16 == taken.sum()
        cut = np.zeros(size, bool)
        for begin in range(0, size, 3 << 20):
            for start, stop in pieces(tensor, begin, min(begin + (3 << 20), size), share, turn):
                cut[start:stop] = True
        assert (cut == taken).all()


@pytest.mark.parametrize("share", [SAMPLE_SHARE, 0.3, 1.0])
def test_many_tensors_have_the_sample_that_each_has_alone(share: float) -> None:
    tensors = np.concatenate((np.arange(3_000), [2**31 + 7]))
    for turn in (0, 2**32 - 1):
        sizes = np.random.default_rng(turn).integers(1, STRIDE_BYTES // 2, len(tensors))
        sizes[:3] = 1, STRIDE_BYTES, 3 * STRIDE_BYTES + 5
        each = [
            (tensor, start, stop - start)
            for tensor, size in zip(tensors.tolist(), sizes.tolist(), strict=True)
            for start, stop in pieces(tensor, 0, size, share, turn)
        ]
        assert list(map(tuple, sampled_checks.pieces_of_many(tensors, sizes, share, turn).tolist())) == each


def test_each_byte_has_its_turn() -> None:
    """As docs/guides/save-checks.md has it: one change of a few bytes is found in one of 256 saves, one of a whole tensor by its size."""
    one, whole, puts = 0, 0, 10_000
    for turn in range(puts):
        drawn = sampled_checks.turn_of(bytes(32), turn)
        one += any(start <= 3_000_000 < stop for start, stop in pieces(3, 0, 64 * MIB, SAMPLE_SHARE, drawn))
        whole += any(pieces(3, 0, MIB, SAMPLE_SHARE, drawn))
    assert one / puts == pytest.approx(SAMPLE_SHARE, rel=0.3)
    assert whole / puts == pytest.approx(MIB / STRIDE_BYTES, rel=0.05)
