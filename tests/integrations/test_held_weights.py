"""The workers of one engine hold the weights once together, and each gives all of them to its model. Real processes, gloo."""

import importlib
import os
import signal
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tests.feed.versions import REF, State, copy_of, first_state, save, train
from tests.integrations import test_sglang_follower, vllm_stub
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, make_store

Weights = Iterator[tuple[str, torch.Tensor]]
WORKERS: list[Any] = []
"""In a rank's process: its `Worker`."""
LAYERS = 9


def passed_on(weights: Weights) -> Generator[tuple[str, torch.Tensor]]:
    yield from weights


class Runner:
    """What a worker gives the weights to: vLLM's model runner, or a model of vLLM or SGLang. Fails as it is asked to."""

    def __init__(self) -> None:
        self.loads: list[list[tuple[str, torch.Tensor]]] = []
        self.how = "all"

    def reload_weights(self, weights_iterator: Weights) -> None:
        self.load_weights(weights_iterator)

    def load_weights(self, weights: Weights) -> None:
        if self.how == "all":
            self.loads.append([(name, tensor.clone()) for name, tensor in weights])
        elif self.how == "closes":  # as a loader that renames does when what it calls raises
            renamed = passed_on(weights)
            next(renamed)
            renamed.close()
            raise RuntimeError("out of memory")
        else:
            next(weights)
            next(weights)
            if self.how == "raises":
                raise RuntimeError("out of memory")
            if self.how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "has no memory":
                with patch.object(torch, "empty_like", side_effect=MemoryError):
                    deque(weights, maxlen=0)


class Worker:
    """One rank of an engine, by one of the examples."""

    def __init__(self, door: str, url: str, group: Any) -> None:
        count = dist.get_world_size(group)
        about = {"world_size": count, "cpu_group": group, "device_group": group, "device": torch.device("cpu")}
        workers = vllm_stub.GroupCoordinator(rank=dist.get_rank(), ranks=[*range(count)], **about)
        vllm_stub.GROUPS["world"] = test_sglang_follower.WORKERS = workers
        self.door, self.url, self.runner = door, url, Runner()
        cache = {"cache_dir": f"{url}/../cache-{dist.get_rank()}", "timeout_seconds": TIMEOUT_SECONDS}
        if door == "sglang_follower":
            with test_sglang_follower.sglang() as self.example:
                pass
            return
        with vllm_stub.installed():
            example: Any = importlib.import_module(f"examples.{door}")
        if door == "vllm_follower":
            self.example = example.Follower()
            self.example.model_runner = self.runner
            self.example.follow(url, REF, "model.", **cache)
        else:
            self.example = example.StoreEngine(None, SimpleNamespace(model_config=None), torch.device("cpu"), self.runner)
            self.example.init_transfer_engine(self.example.init_info_cls(store=url, ref=REF, prefix="model."))

    def held(self) -> Any:
        if self.door == "sglang_follower":
            return self.example.held_weights(self.url, REF, "model.", None)
        return self.example.held

    def update(self, root: str) -> None:
        if self.door == "vllm_follower":
            self.example.stage(root)
            self.example.swap()
        elif self.door == "vllm_plugin":
            self.example.start_weight_update()
            self.example.update_weights({"root": root})
            self.example.finish_weight_update()
        else:
            self.example.load(self.runner, self.example.named(self.url, REF, root, prefix="model."))


def begin(door: str, folder: str, count: int) -> None:
    WORKERS.append(Worker(door, f"{folder}/store", GROUPS[count]))


def begin_badly(place: str, door: str, folder: str, count: int, only: int) -> None:
    """As `begin`, but one rank fails there."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == only:
            patch.setattr(
                f"examples.held_weights.{place}", Mock(side_effect=tsck.errors.BackendUnavailableError("no answer", object_id="x"))
            )
        begin(door, folder, count)


def load_with_another_root(only: int) -> None:
    """One rank's feed is at another version than the others'."""
    root = ("1" if dist.get_rank() == only else "2") * 64
    held = WORKERS[0].held()
    held.feed = SimpleNamespace(swap=lambda: None, version=SimpleNamespace(root=root, step=1), close=held.feed.close)
    held.load(list)


def update(root: str) -> list[tuple[str, torch.Tensor]]:
    """A rank loads a version; returns what its engine got."""
    WORKERS[0].update(root)
    return WORKERS[0].runner.loads[-1]  # type: ignore[no-any-return]


def held_bytes() -> int:
    return sum(tensor.nbytes for tensor in WORKERS[0].held().tensors.values())


def loads() -> int:
    return len(WORKERS[0].runner.loads)


def fail(how: str, only: int) -> None:
    """From now on one rank's engine does so."""
    WORKERS[0].runner.how = how if dist.get_rank() == only else "all"


def expect_an_end() -> None:
    """What follows waits for a rank that does not come."""
    WORKERS[0].held().timeout_seconds = 1


def stage(root: str) -> None:
    WORKERS[0].example.stage(root)


def swap() -> int | None:
    return WORKERS[0].example.swap()  # type: ignore[no-any-return]


def loaded() -> str | None:
    return WORKERS[0].held().loaded  # type: ignore[no-any-return]


def end() -> None:
    while WORKERS:
        WORKERS.pop().held().store.close()


def more_dtypes() -> dict[str, torch.Tensor]:
    """What does not change, and gloo does not know or cannot send as it is."""
    eighths = torch.arange(64.0).view(8, 8)
    return {
        "scale": torch.tensor(0.5),
        "none": torch.zeros(0, 4),
        "fp8": eighths.to(torch.float8_e4m3fn),
        "turned": eighths.t(),
        "bool": eighths > 9,
    }


@pytest.fixture
def folder(tmp_path: Path, pool: Pool) -> Iterator[Path]:
    make_store(tmp_path)
    yield tmp_path
    pool.run(end)


@pytest.fixture
def trainer(folder: Path) -> Iterator[tsck.Store]:
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        yield store


@pytest.mark.parametrize(
    ("door", "count"),
    [("vllm_follower", 2), ("vllm_plugin", 2), ("sglang_follower", 2), pytest.param("vllm_follower", 4, marks=pytest.mark.slow)],
)
def test_each_worker_holds_a_part_and_loads_all(pool: Pool, folder: Path, trainer: tsck.Store, door: str, count: int) -> None:
    changing, other = first_state(layers=LAYERS), more_dtypes()
    roots, states = [], []
    for step in range(3):
        states.append({**copy_of(changing)["model"], **other})
        roots.append(save(trainer, {"model": states[-1]}, step).root)
        train(changing, step)
    pool.run(begin, door, str(folder), count, ranks=count)
    for step in (0, 1, 2, 1):
        for given in pool.run(update, roots[step], ranks=count):
            assert [name for name, _ in given] == [*states[step]]
            for name, tensor in given:
                assert tensor.dtype == states[step][name].dtype
                assert torch.equal(tensor.float(), states[step][name].float()), name
    held = pool.run(held_bytes, ranks=count)
    sizes = [tensor.nbytes for tensor in states[0].values()]
    assert sum(held) == sum(sizes)
    assert max(held) - min(held) <= max(sizes)


@pytest.mark.parametrize("only", [0, 1])
@pytest.mark.parametrize("how", ["raises", "closes"])
def test_a_load_that_fails_on_one_worker_fails_and_is_repeated_on_all(
    pool: Pool, folder: Path, trainer: tsck.Store, how: str, only: int
) -> None:
    root = save(trainer, first_state(layers=LAYERS), 0).root
    pool.run(begin, "vllm_follower", str(folder), 2, ranks=2)
    pool.run(fail, how, only, ranks=2)
    pool.run(stage, root, ranks=2)
    answers = pool.ask(swap, ranks=2)
    assert answers[0] is None, "vLLM reads the answers of the workers in their order, up to the first error"
    assert isinstance(answers[1], RuntimeError)
    assert ("out of memory" if only == 1 else f"another worker could not load {root}") in str(answers[1])
    assert pool.run(loaded, ranks=2) == [None, None]
    pool.run(fail, "all", only, ranks=2)
    before = pool.run(loads, ranks=2)
    for _ in range(2):
        assert pool.run(swap, ranks=2) == [0, 0]
        assert pool.run(loads, ranks=2) == [number + 1 for number in before]
    assert pool.run(loaded, ranks=2) == [root, root]


def test_an_engine_that_needs_no_more_sends_its_part_to_the_others(pool: Pool, folder: Path, trainer: tsck.Store) -> None:
    state = first_state(layers=LAYERS)
    root = save(trainer, state, 0).root
    pool.run(begin, "vllm_follower", str(folder), 2, ranks=2)
    pool.run(fail, "stops", 0, ranks=2)
    pool.run(stage, root, ranks=2)
    assert pool.run(swap, ranks=2) == [0, 0]
    assert pool.run(loads, ranks=2) == [0, 1]


def test_what_cannot_be_staged_fails_on_all(pool: Pool, folder: Path, trainer: tsck.Store) -> None:
    save(trainer, first_state(), 0)
    pool.run(begin, "vllm_follower", str(folder), 2, ranks=2)
    answers = pool.ask(stage, "0" * 64, ranks=2)
    assert answers[0] is None
    assert isinstance(answers[1], tsck.errors.NotFoundError)


@pytest.mark.parametrize("only", [0, 1])
@pytest.mark.parametrize("place", ["tsck.open", "HeldWeights._divide"])
def test_an_error_of_one_worker_before_it_follows_is_one_of_all_and_heals(
    pool: Pool, folder: Path, trainer: tsck.Store, place: str, only: int
) -> None:
    root = save(trainer, first_state(), 0).root
    answers = pool.ask(begin_badly, place, "vllm_plugin", str(folder), 2, only, ranks=2)
    assert isinstance(answers[only], tsck.errors.BackendUnavailableError)
    assert "another worker could not" in str(answers[1 - only])
    pool.run(begin, "vllm_plugin", str(folder), 2, ranks=2)
    assert len({len(found) for found in pool.run(update, root, ranks=2)}) == 1


def test_workers_at_different_versions_load_nothing(pool: Pool, folder: Path, trainer: tsck.Store) -> None:
    save(trainer, first_state(), 0)
    pool.run(begin, "vllm_plugin", str(folder), 2, ranks=2)
    assert all("different versions" in str(answer) for answer in pool.ask(load_with_another_root, 1, ranks=2))


@pytest.mark.slow
@pytest.mark.parametrize("only", [0, 2])
@pytest.mark.parametrize("how", ["is killed", "has no memory"])
def test_a_worker_that_is_lost_in_a_load_is_an_error_of_all(tmp_path: Path, how: str, only: int) -> None:
    make_store(tmp_path)
    count = 3
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as trainer, Pool(count) as pool:
        state: State = first_state(layers=LAYERS)
        root = save(trainer, state, 0).root
        pool.run(begin, "vllm_follower", str(tmp_path), count, ranks=count)
        pool.run(stage, root, ranks=count)
        assert pool.run(swap, ranks=count) == [0] * count
        train(state, 1)
        root = save(trainer, state, 1).root
        pool.run(fail, how, only, ranks=count)
        pool.run(stage, root, ranks=count)
        pool.run(expect_an_end, ranks=count)
        answers = pool.ask(swap, ranks=count)
        killed = {only} if how == "is killed" else set()
        for rank, answer in enumerate(answers):
            assert isinstance(answer, EOFError if rank in killed else Exception if rank == count - 1 else type(None)), (rank, answer)
        for rank in {*range(count)} - killed:
            assert pool.ask_one(rank, loaded) is None
