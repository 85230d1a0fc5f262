"""Saves that were reported to succeed with the wrong content, each as it happened: the store says so."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.cli.app import main
from tensorstore_ck.engine.write.suspicious_save import SuspiciousSaveWarning
from tensorstore_ck.errors import InvalidOptionError, SuspiciousSaveError
from tests.group_of_one import group_of_one
from tests.session.group.pool import Pool, make_store
from tests.session.save import rank_side
from tests.session.save.places import Scene, scene

HIDDEN = 96
"""So that weights take blocks of their own, and biases lie inside the part."""


class Job:
    """A model under Adam."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.optimizer = torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad], **options)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, HIDDEN)).square().mean().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "rng": torch.get_rng_state()}


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def weights(seed: int, size: int = 5000) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# --- nothing moved ------------------------------------------------------------------------------------------------------


def test_asynchronous_saves_of_a_buffer_that_is_not_filled_any_more(place: Scene) -> None:
    """As reported: the snapshots of steps 90, 110 and 120 were bit-identical."""
    job = Job()
    buffer: dict[str, Any] = {}

    def save(step: int, *, refreshed: bool) -> None:
        if refreshed:
            buffer.update(copy.deepcopy(job.state()))
        buffer["step"] = step
        place.store.put_snapshot_async(buffer, ref="job", step=step).wait()

    with no_warning():
        for step in (70, 80, 90):
            job.train(10)
            save(step, refreshed=True)
    for step in (110, 120):
        job.train(10)
        with pytest.warns(SuspiciousSaveWarning, match=f"job@{step}: no floating tensor differs from the save before"):
            save(step, refreshed=False)
    assert place.steps() == [70, 80, 90, 110, 120]
    with no_warning():
        save(130, refreshed=True)


def put_two(place: Scene) -> None:
    for step in (1, 2):
        place.store.put_snapshot({"w": weights(step)}, ref="job", step=step)


def test_whether_it_is_an_error_a_warning_or_meant_is_the_users_to_say(place: Scene) -> None:
    put_two(place)
    with pytest.raises(SuspiciousSaveError, match=r"nothing was published to 'job': no floating tensor differs.*\(step 2\)"):
        place.store.put_snapshot({"w": weights(2)}, ref="job", step=3, unchanged="error")
    pending = place.store.put_snapshot_async({"w": weights(2)}, ref="job", step=3, unchanged="error")
    with pytest.raises(SuspiciousSaveError):
        pending.wait()
    assert place.steps() == [1, 2]
    with no_warning():
        place.store.put_snapshot({"w": weights(2)}, ref="job", step=3, unchanged="ok")
        place.store.put_snapshot_async({"w": weights(2)}, ref="job", step=4, unchanged="ok").wait()
        place.store.put_snapshot({"w": weights(3)}, ref="job", step=5, unchanged="error")
    with pytest.raises(InvalidOptionError, match="unchanged must be"):
        place.store.put_snapshot({"w": weights(2)}, ref="job", step=6, unchanged="never")  # type: ignore[arg-type]


def test_a_frozen_base_counts_neither_for_nor_against(place: Scene) -> None:
    def put(step: int, adapter: int, **options: Any) -> None:
        state = {"base": {"w": base, "scale": torch.ones(3)}, "lora": {"a": weights(adapter, 3000), "b": weights(adapter, 10)}}
        place.store.put_snapshot(state, ref="job", step=step, **options)

    base = weights(0, 50_000)
    with no_warning():
        for step in (1, 2, 3):
            put(step, adapter=step, frozen=["base.*"])
    with pytest.warns(SuspiciousSaveWarning, match="no floating tensor"):
        put(4, adapter=3, frozen=["base.*"])
    with no_warning():
        put(5, adapter=5)


@pytest.mark.parametrize("size", [10, 5000])
def test_integers_and_step_counters_that_move_hide_nothing(place: Scene, size: int) -> None:
    def put(step: int, seed: int) -> None:
        state = {
            "w": weights(seed, size),
            "rng": torch.full((2000,), step),
            "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}},
        }
        place.store.put_snapshot(state, ref="job", step=step)

    put(1, 1)
    put(2, 2)
    with pytest.warns(SuspiciousSaveWarning, match="no floating tensor"):
        put(3, 2)


def test_what_is_none_of_its_business(place: Scene) -> None:
    """Only what is small moves; nothing ever moved; the step did not move on; and another ref says nothing."""
    put_two(place)
    place.store.branch("other", "job")
    place.store.checkout("other")  # whose root is that of "job", too
    with no_warning():
        place.store.put_snapshot({"w": weights(2)}, ref="third", step=3)
        for step in (1, 2, 3, 4):
            place.store.put_snapshot({"base": weights(min(step, 2)), "bias": torch.full((3,), float(step))}, ref="small", step=step)
        for step in range(8):
            place.store.put_snapshot({"w": weights(1), "seen": step}, ref="never", step=step)
        for at, seed in ((1, 1), (2, 2), (2, 2), (None, 2), (None, 2), (1, 2)):
            place.store.put_snapshot({"w": weights(seed), "again": torch.rand(2000).long()}, ref="again", step=at)


def test_a_resumed_job_knows_its_history(place: Scene) -> None:
    put_two(place)
    with place.other() as store:
        state = store.checkout("job")
        with pytest.warns(SuspiciousSaveWarning, match="no floating tensor"):
            store.put_snapshot(state, ref="job", step=3)


def test_nothing_is_read_for_it_but_parts_and_records(place: Scene) -> None:
    put_two(place)
    place.gate.calls_made.clear()
    with pytest.warns(SuspiciousSaveWarning, match="no floating tensor"):
        place.store.put_snapshot({"w": weights(2)}, ref="job", step=3)
    read = [each for each in place.gate.calls_made if each.startswith(("get", "read"))]
    assert not [each for each in read if "packs/" in each or "parts/" in each], read


def test_what_is_staged_is_compared_with_what_is_staged(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True, staging=tsck.Staging(tmp_path / "disk")) as store:
        for step in (1, 2):
            store.put_snapshot_async({"w": weights(step)}, ref="job", step=step).staged.wait()
        with pytest.warns(SuspiciousSaveWarning, match="no floating tensor"):
            store.put_snapshot_async({"w": weights(2)}, ref="job", step=3).staged.wait()


# --- the optimizer's steps ----------------------------------------------------------------------------------------------


def put_job(store: tsck.Store, job: Job, step: int, optimizer: object = None, **options: Any) -> None:
    state = job.state()
    store.put_snapshot(state if optimizer is None else {**state, "optimizer": optimizer}, ref="job", step=step, **options)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_an_optimizer_of_another_step_than_the_weights(place: Scene, is_ahead: bool) -> None:
    """As reported: an optimizer at step 2 with weights of step 1."""
    job = Job()
    job.train()
    with no_warning():
        put_job(place.store, job, 1)
    old = copy.deepcopy(job.optimizer.state_dict())
    job.train()
    if is_ahead:
        weights_now = copy.deepcopy(job.model.state_dict())
        job.train()
        old = job.optimizer.state_dict()
        job.model.load_state_dict(weights_now)
    at = 3 if is_ahead else 1
    with pytest.warns(SuspiciousSaveWarning, match=f"at 'optimizer' are at {at}; in the save before .step 1. they were at 1.* makes 2"):
        put_job(place.store, job, 2, old)
    assert place.steps() == [1, 2]


def test_counters_that_disagree_among_themselves(place: Scene) -> None:
    job = Job()
    job.train(2)
    state = copy.deepcopy(job.state())
    state["optimizer"]["state"][0]["step"] = torch.tensor(3.0)  # captured while step() was under way
    with pytest.warns(SuspiciousSaveWarning, match="are from 2 to 3: was it captured in the middle of a step"):
        place.store.put_snapshot(state, ref="first", step=2)
    put_job(place.store, job, 2)
    with pytest.raises(SuspiciousSaveError, match="are from 2 to 3"):
        place.store.put_snapshot(state, ref="job", step=3, unchanged="error")


def test_parameters_that_are_not_used_at_each_step_are_reported_once(place: Scene) -> None:
    job = Job()
    expert = nn.Parameter(torch.ones(10))
    job.optimizer.add_param_group({"params": [expert]})
    expert.grad = torch.ones(10)
    job.train(4)  # its gradient goes with the first zero_grad
    expert.grad = torch.ones(10)
    job.optimizer.step()
    with pytest.warns(SuspiciousSaveWarning, match="from 1 to 5"):
        put_job(place.store, job, 5)
    with no_warning():
        for step in (7, 9):
            job.train(2)
            put_job(place.store, job, step)


@pytest.mark.parametrize("first", [0, 100])
def test_any_constant_distance_between_counters_and_steps_is_fine(place: Scene, first: int) -> None:
    job = Job()
    with no_warning():
        for step in (10, 20, 25, 26):
            job.train(step if step == 10 else {20: 10, 25: 5, 26: 1}[step])
            put_job(place.store, job, first + step)
    job.train(5)
    with pytest.warns(SuspiciousSaveWarning, match="which makes 36"):
        put_job(place.store, job, first + 36)


def test_steps_of_several_micro_batches(place: Scene) -> None:
    job = Job()
    with no_warning():
        for step in (100, 200, 300):
            job.train(25)
            put_job(place.store, job, step)
    stuck = copy.deepcopy(job.optimizer.state_dict())
    job.train(25)
    with pytest.warns(SuspiciousSaveWarning, match="which makes more"):
        put_job(place.store, job, 400, stuck)


@pytest.mark.parametrize("between", [1, 2, 3])
def test_saves_between_micro_batches(place: Scene, between: int) -> None:
    job = Job()
    with no_warning():
        for step in range(1, 14):
            job.train(step % 4 == 0)
            if step % between == 0:
                place.store.put_snapshot({**job.state(), "gradients": weights(step)}, ref="job", step=step)


def test_a_gradient_scaler_may_skip_steps(place: Scene) -> None:
    job = Job()
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 5}

    def put(step: int) -> None:
        place.store.put_snapshot({**job.state(), "scaler": scaler}, ref="job", step=step)

    with no_warning():
        for step, steps in ((10, 10), (20, 9), (21, 0), (24, 3)):
            job.train(steps)
            next(job.model.parameters()).data += 1e-3
            put(step)
    job.train(12)
    with pytest.warns(SuspiciousSaveWarning, match="which makes 32"):
        put(34)


@pytest.mark.parametrize("key", ["state", "param_groups"])
def test_counters_that_are_plain_numbers(place: Scene, key: str) -> None:
    def put(step: int, count: int) -> None:
        counted = [{"lr": 0.1, "step": count}] if key == "param_groups" else {0: {"step": count, "m": weights(step)}}
        place.store.put_snapshot(
            {"before": {"a": 7, "b": None}, "w": weights(step), "one": {key: counted}, "after": step}, ref="job", step=step
        )

    with no_warning():
        put(1, 1)
        put(2, 2)
    with pytest.warns(SuspiciousSaveWarning, match="at 'one' are at 2; .* makes 3"):
        put(3, 2)


def test_a_training_state(place: Scene) -> None:
    job = Job()
    training = tsck.TrainingState(model=job.model, optimizer=job.optimizer)
    with no_warning():
        for step in (1, 2):
            job.train()
            training.put(place.store, ref="job", step=step)
    job.train()
    with pytest.raises(SuspiciousSaveError, match=r"at 'optimizer' are at 3; .* makes 9"):
        training.put(place.store, ref="job", step=9, unchanged="error")
    with pytest.warns(SuspiciousSaveWarning, match="makes 9"):
        training.put_async(place.store, ref="job", step=9).wait()


def test_a_checkpointer_passes_it_on(place: Scene) -> None:
    state = {"w": weights(1)}
    with tsck.Checkpointer(
        place.store, state, ref="job", when=tsck.every_steps(1), asynchronous=False, unchanged="error", verify_capture=1.0
    ) as ckpt:
        ckpt.step(1)
        state["w"].add_(1)
        ckpt.step(2)
        with pytest.warns(UserWarning, match="step 3 was not saved: nothing was published to 'job': no floating tensor"):
            ckpt.step(3)
        state["w"].add_(1)
        ckpt.step(4)
    assert place.steps() == [1, 2, 4]


# --- numbers that are not finite ------------------------------------------------------------------------------------------


def noted(store: tsck.Store, address: str) -> object:
    return store.show(address).metadata.get("tsck")


@pytest.mark.parametrize("size", [100, 40_000, 3_000_000])
def test_a_model_that_diverges(place: Scene, size: int) -> None:
    w, mask = weights(1, size), torch.full((300,), -torch.inf)
    with no_warning():
        place.store.put_snapshot({"w": w, "mask": mask}, ref="job", step=1)
        place.store.put_snapshot({"w": w + 1, "mask": mask}, ref="job", step=2)
    with pytest.warns(SuspiciousSaveWarning, match="NaN or infinite, and .* were in the save before .step 2."):
        place.store.put_snapshot({"w": w * torch.nan, "mask": mask}, ref="job", step=3)
    with no_warning():  # once is enough
        place.store.put_snapshot({"w": w.clone().fill_(torch.inf), "mask": mask}, ref="job", step=4)


def test_a_tensor_in_several_small_regions_counts_once(place: Scene) -> None:
    def put(w: torch.Tensor, step: int) -> None:
        boxes = tsck.Boxes([tsck.Box(w[start : start + 50].clone(), (200,), (start,)) for start in range(0, 200, 50)])
        place.store.put_snapshot({"w": boxes, "rest": torch.ones(300)}, ref="job", step=step, group=dist.group.WORLD)

    w = weights(1, 200)
    with group_of_one(), no_warning():
        put(w, 1)
        put(w + 1, 2)
        with pytest.warns(SuspiciousSaveWarning, match=r"the save before .step 2."):
            put(torch.where(torch.arange(200) % 10 == 0, torch.nan, w), 3)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_the_share_is_in_the_metadata(place: Scene, dtype: torch.dtype) -> None:
    half = torch.tensor([1.0, torch.nan, torch.finfo(dtype).max, torch.nan], dtype=torch.float64).repeat(500).to(dtype)
    place.store.put_snapshot({"w": half, "small": half[:6], "n": torch.arange(9)}, ref="job", step=1, metadata={"lr": 1.0})
    expected = 0.25 if dtype.is_complex else 0.5
    assert noted(place.store, "job") == {"non_finite": pytest.approx(expected, abs=0.01)}


def test_finite_states_have_no_note_and_equal_states_equal_roots(place: Scene) -> None:
    place.store.put_snapshot({"w": weights(1)}, ref="job", step=1)
    assert noted(place.store, "job") is None
    state = {"w": weights(1, 2_000_000)}
    state["w"][::7] = torch.nan
    roots = set()
    for number, options in enumerate(({}, {"verify_capture": 1.0}, {"verify_capture": 0.0}, {"unchanged": "ok"})):
        roots.add(place.store.put_snapshot(state, ref=f"sync-{number}", step=5, expect=None, **options).root)  # type: ignore[arg-type]
    with scene() as other:
        roots |= {other.store.put_snapshot_async(state, ref="job", step=5).wait().root}
        first = other.store.put_snapshot(weights(1), ref="first", step=1)
    with scene() as third:
        roots |= {third.store.put_snapshot(state, ref="job", step=5).root}
        assert third.store.put_snapshot(weights(1), ref="first", step=1).root == first.root
    assert len(roots) == 1


def test_the_key_is_the_stores_own(place: Scene) -> None:
    with pytest.raises(InvalidOptionError, match=r"metadata\['tsck'\] belongs to the store"):
        place.store.put_snapshot({"w": weights(1)}, ref="job", metadata={"tsck": 1})
    place.store.put_snapshot({"w": weights(1)}, ref="job", metadata={"tsck": {"non_finite": 0.5}, "lr": 1})  # of another snapshot
    assert place.store.show("job").metadata == {"lr": 1}


# --- many ranks -----------------------------------------------------------------------------------------------------------


def test_the_check_covers_all_ranks_together(pool: Pool, tmp_path: Path) -> None:
    def put(step: int, moves: list[int], **options: Any) -> tuple[set[str], list[str]]:
        """How it ended, and what was warned of on any rank."""
        ends = pool.run(rank_side.put_moved, step, moves, options, ranks=2)
        return {f"{kind} {text}" if kind != "published" else kind for (kind, text), _ in ends}, [text for _, told in ends for text in told]

    make_store(tmp_path, block_bytes=64 << 10)
    pool.run(rank_side.begin, str(tmp_path), 2, [None, None], ranks=2)
    for step, moves in ((1, [0, 1]), (2, [0, 1]), (3, [1]), (4, [0]), (5, [0])):
        assert put(step, moves) == ({"published"}, [])
    ended, told = put(6, [])
    assert ended == {"published"}
    assert len(told) == 1
    assert "job@6: no floating tensor differs from the save before (step 5)" in told[0]
    ended, told = put(7, [0, 1], count=9)
    assert ended == {"published"}
    assert len(told) == 1
    assert "are at 9; in the save before (step 6) they were at 6" in told[0]
    ended, told = put(8, [], unchanged="error")
    assert not told
    assert len(ended) == 1  # all ranks raise the same
    assert "SuspiciousSaveError the save to 'job' was refused: nothing was published to 'job': no floating tensor" in ended.pop()
    assert put(10, [0]) == ({"published"}, [])
    pool.run(rank_side.end, ranks=2)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "look") as store:
        assert [snapshot.step for snapshot in store.log("job")] == [10, 7, 6, 5, 4, 3, 2, 1]


# --- files ----------------------------------------------------------------------------------------------------------------


def test_files_are_what_they_are(tmp_path: Path) -> None:
    """A user who imports files of the same weights intends to; and what the store said of them elsewhere is no metadata of theirs."""
    for number, seed in enumerate((1, 2, 2), start=1):
        save_file(
            {"w": weights(seed), "n": torch.arange(5)}, tmp_path / f"{number}.safetensors", {"tsck": '{"non_finite": 0.5}', "by": "me"}
        )
    with tsck.open(tmp_path / "store", create=True) as store:
        for number in (1, 2, 3):
            with no_warning():
                tsck.import_checkpoint(store, tmp_path / f"{number}.safetensors", ref="imported", step=number)
            arguments = ["-s", str(tmp_path / "store"), "--ref", "put", "--step", str(number)]
            done = CliRunner().invoke(main, ["put", str(tmp_path / f"{number}.safetensors"), *arguments])
            assert done.exit_code == 0, done.output
            assert "no floating tensor" not in done.output
        assert [store.show(ref).metadata for ref in ("imported", "put")] == [{"by": "me"}] * 2
