"""Ranks with several layouts, such as the stages of a pipeline, save one snapshot: it comes back as one, or in other stages.

What would make it ambiguous is refused when it is saved.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import tensorstore_ck as tsck
from tensorstore_ck.session.group import planning_round
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, local_of, opened

LAYERS = 4


@dataclass(frozen=True)
class Pipeline:
    """Stages of a few neighbouring layers each, every one spread over its own ranks; what `shared` names, all stages have."""

    stages: int
    ranks: int

    def stage(self, rank: int) -> int:
        return rank * self.stages // self.ranks

    def state(self, rank: int, seed: int) -> dict[str, Any]:
        stage, width = self.stage(rank), self.ranks // self.stages
        mesh = DeviceMesh("cpu", torch.arange(stage * width, (stage + 1) * width), _init_backend=False)
        own = range(stage * LAYERS // self.stages, (stage + 1) * LAYERS // self.stages)
        model, optim = {}, {}
        for name, full in layers(seed).items():
            if name.startswith("layers") and int(name.split(".")[1]) not in own:
                continue
            model[name] = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None) if full.ndim else full.clone()
            optim[name] = {"exp_avg": distribute_tensor(full.square(), mesh, [Shard(0)], src_data_rank=None), "step": torch.tensor(3.0)}
        return {"step": seed, "model": model, "optim": optim}


def layers(seed: int) -> dict[str, torch.Tensor]:
    """Of all stages, with an embedding that each of them has."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (60, 40)} | {f"layers.{number}.weight": (50 + number, 40) for number in range(LAYERS)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


PIPELINES = {
    "2 stages of 1": Pipeline(2, 2),
    "2 stages of 2": Pipeline(2, 4),
    "4 stages of 1": Pipeline(4, 4),
    "4 stages of 2": Pipeline(4, 8),
}
PIPELINES |= {"no stages": Pipeline(1, 3), "one rank": Pipeline(1, 1)}


def tensors_in(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state["model"].items():
        yield name, value
    for name, moments in state["optim"].items():
        yield f"{name}'s exp_avg", moments["exp_avg"]
        yield f"{name}'s step", moments["step"]


def put_pipeline(folder: str, name: str, seed: int) -> str:
    rank, pipeline = torch.distributed.get_rank(), PIPELINES[name]
    store = opened(folder, pipeline.ranks)
    state = pipeline.state(rank, seed)
    ref = "pipeline-" + name.replace(" ", "-")
    return store.put_snapshot(state, ref=ref, step=seed, group=GROUPS[pipeline.ranks], timeout_seconds=TIMEOUT_SECONDS).root


def restore_pipelines(folder: str, root: str, seed: int, names: list[str]) -> None:
    rank = torch.distributed.get_rank()
    for name in names:
        pipeline = PIPELINES[name]
        if rank >= pipeline.ranks:
            continue
        target = pipeline.state(rank, seed + 1)
        store = opened(folder, pipeline.ranks)
        store.checkout(root, into=target, group=GROUPS[pipeline.ranks], timeout_seconds=TIMEOUT_SECONDS)
        assert target["step"] == seed
        for (what, found), (_, expected) in zip(tensors_in(target), tensors_in(pipeline.state(rank, seed)), strict=True):
            for one, two in zip(local_of(found), local_of(expected), strict=True):
                assert torch.equal(one, two), (name, what)


@pytest.mark.parametrize("name", PIPELINES)
def test_any_pipeline_to_any_other(pool: Pool, folder: Path, name: str) -> None:
    (root,) = set(pool.run(put_pipeline, str(folder), name, 5, ranks=PIPELINES[name].ranks))
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        assert store.resolve(root).logical_bytes >= sum(2 * full.nbytes for full in layers(5).values())
        restored = store.checkout(root)
        assert restored["step"] == 5
        assert {name: tensor.tolist() for name, tensor in restored["model"].items()} == {
            name: tensor.tolist() for name, tensor in layers(5).items()
        }
        assert all(torch.equal(moments["exp_avg"], layers(5)[name].square()) for name, moments in restored["optim"].items())
        assert set(restored["optim"]) == set(layers(5))
        with store.open_snapshot(root) as lazy:
            assert torch.equal(lazy["model.embed"][10:20], layers(5)["embed"][10:20])
        assert store.fsck(read_data=True).ok
    names = list(PIPELINES)
    others = [names[(names.index(name) + step) % len(names)] for step in (0, 1, 3)]
    pool.run(restore_pipelines, str(folder), root, 5, others)


# --- what does not fit --------------------------------------------------------------------------------------------------


def restore_into(folder: str, address: str, parts: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """Each rank into its own state; what it then holds."""
    mine = parts[torch.distributed.get_rank()]
    report = tsck.LoadReport()
    if options.get("strict") is False:
        options = {**options, "report": report}
    restored = opened(folder, len(parts)).checkout(address, into=mine, group=GROUPS[len(parts)], timeout_seconds=TIMEOUT_SECONDS, **options)
    return {"restored": restored, "report": (report.missing, report.unexpected, report.mismatched)}


def put_each(folder: str, ref: str, parts: list[Any], step: int = 1) -> str:
    """Each rank its own state."""
    mine = parts[torch.distributed.get_rank()]
    return opened(folder, len(parts)).put_snapshot(mine, ref=ref, step=step, group=GROUPS[len(parts)], timeout_seconds=TIMEOUT_SECONDS).root


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_what_no_rank_expects_is_an_error(pool: Pool, folder: Path) -> None:
    names = ["a", "b", "c", "d"]
    full = {name: numbers(number, 20, 60) for number, name in enumerate(names)}
    pool.run(put_each, str(folder), "expected", [full, full], ranks=2)
    zeros = {name: torch.zeros(20, 60) for name in names}
    halves = [{name: zeros[name] for name in part} for part in ("ab", "cd")]
    answers = pool.run(restore_into, str(folder), "expected", halves, {}, ranks=2)
    for answer, part in zip(answers, ("ab", "cd"), strict=True):
        assert {name: tensor.tolist() for name, tensor in answer["restored"].items()} == {name: full[name].tolist() for name in part}
    forgotten = [{name: zeros[name] for name in part} for part in ("ab", "ac")]
    for error in pool.ask(restore_into, str(folder), "expected", forgotten, {}, ranks=2):
        assert isinstance(error, tsck.MismatchError)
        assert "1 not expected by `into` on any rank: d" in str(error)
    pool.run(restore_into, str(folder), "expected", forgotten, {"select": ["a", "b", "c"]}, ranks=2)
    answers = pool.run(restore_into, str(folder), "expected", forgotten, {"strict": False}, ranks=2)
    assert [answer["report"][1] for answer in answers] == [["c", "d"], ["b", "d"]]
    missing = [{name: zeros[name] for name in part} | {"e": torch.zeros(1)} for part in ("ab", "cd")]
    for error in pool.ask(restore_into, str(folder), "expected", missing, {}, ranks=2):
        assert "1 missing in the snapshot: e" in str(error)


SAME: dict[str, Any] = {"step": 1, "norm": numbers(0, 900), "small": numbers(1, 3), "names": ["x"], "text": "y" * 100_000}


def with_state(name: str, state: Any) -> dict[str, Any]:
    return {**SAME, f"of {name}": numbers(2, 30), **state}


CONFLICTS: dict[str, tuple[Any, Any, str]] = {
    "shapes": ({"w": numbers(3, 40)}, {"w": numbers(3, 50)}, "'w' together: ranks 0-1: float32 [40]; rank 2: float32 [50]"),
    "dtypes": ({"w": numbers(3, 40)}, {"w": numbers(3, 40).double()}, "ranks 0-1: float32 [40]; rank 2: float64 [40]"),
    "large tensors": ({"w": numbers(3, 4000)}, {"w": numbers(4, 4000)}, "have tensors that are not equal as 'w'"),
    "small tensors": ({"w": numbers(3, 4)}, {"w": numbers(4, 4)}, "have tensors that are not equal as 'w'"),
    "values": ({"v": {"lr": 1}}, {"v": {"lr": 2}}, "'v.lr' together: ranks 0-1: 1; rank 2: 2"),
    "types of values": ({"v": 1}, {"v": True}, "'v' together: ranks 0-1: 1; rank 2: True"),
    "large values": ({"v": "a" * 100_000}, {"v": "b" * 100_000}, "'v' together: ranks 0-1: a large value with the hash "),
    "a value and a tensor": ({"v": 1}, {"v": torch.tensor(1)}, "'v' together: ranks 0-1: a value; rank 2: a tensor"),
    "a dict and a list": ({"v": {"0": 1}}, {"v": [1]}, "'v' together: ranks 0-1: a dict; rank 2: a "),
    "a dict and a value": ({"v": {"0": 1}}, {"v": 1}, "'v' together: ranks 0-1: a dict; rank 2: a value"),
    "lengths of lists": (
        {"groups": [{"params": ["a", "b"]}]},
        {"groups": [{"params": ["c"]}]},
        "'groups.0.params' together: ranks 0-1: a list of 2; rank 2: a list of 1",
    ),
    "an optimizer": (
        {"optim": {"state": {0: {"exp_avg": torch.zeros(2000)}}, "param_groups": [{"params": [0]}]}},
        {"optim": {"state": {0: {"exp_avg": torch.zeros(2000)}}, "param_groups": [{"params": [0]}]}},
        "'optim.state' together: the same number may mean different parameters on ranks 0-1 and on rank 2",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_one_name_for_two_things_is_refused(pool: Pool, folder: Path, name: str) -> None:
    first, second, said = CONFLICTS[name]
    ref = "conflict-" + name.replace(" ", "-")
    parts = [with_state("first", first), with_state("first", first), with_state("second", second)]
    for error in pool.ask(put_each, str(folder), ref, parts, ranks=3):
        assert isinstance(error, tsck.MismatchError), error
        assert "ranks 0-1" in str(error)
        assert "rank 2" in str(error)
        assert said in str(error)
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        assert ref not in store.branches()


def put_unchecked(folder: str, ref: str, parts: list[Any], step: int) -> str:
    """As builds did that compared values with the first save only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning_round, "values_of", lambda united, kinds: ([], []))
        return put_each(folder, ref, parts, step)


def test_values_that_differ_later_are_reported_when_they_are_asked_for(pool: Pool, folder: Path) -> None:
    """No value of one stage is ever taken for another's, also in snapshots of builds that let them differ."""
    for step, times in ((1, (0.5, 0.5)), (2, (0.5, 0.7))):
        parts = [with_state(name, {"time": time, "step": step}) for name, time in zip(("first", "second"), times, strict=True)]
        for error in pool.ask(put_each, str(folder), "refused", parts, step, ranks=2) if step == 2 else ():
            assert "'time' together: rank 0: 0.5; rank 1: 0.7" in str(error)
        (root,) = set(pool.run(put_unchecked if step == 2 else put_each, str(folder), "later", parts, step, ranks=2))
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        assert store.checkout("later@1")["time"] == 0.5
        with pytest.raises(tsck.MismatchError, match=r"had different values of 'time'; leave it out with select= or rename="):
            store.checkout(root)
        assert store.checkout(root, select=["step", "norm"])["step"] == 2
        target = with_state("first", {"time": 0.1, "step": 0, "norm": torch.zeros(900)}) | {"of second": torch.zeros(30)}
        with pytest.raises(tsck.MismatchError, match=r"1 do not match: time: the ranks that saved this snapshot had different values"):
            store.checkout(root, into=target)
        assert not target["norm"].any()
        store.checkout(root, into=target, rename=lambda name: None if name == "time" else name, select=["step", "norm"], strict=False)
        report = tsck.LoadReport()
        store.checkout(root, into=target, strict=False, report=report)
        assert (target["time"], target["step"]) == (0.1, 2)
        assert torch.equal(target["norm"], SAME["norm"])
        assert [text.partition(":")[0] for text in report.mismatched] == ["time"]


# --- numbers of an optimizer's parameters -------------------------------------------------------------------------------


def optimizer_of(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 40)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def put_optimizer(folder: str) -> str:
    """As DDP has it: the same numbers on all ranks."""
    _, optimizer = optimizer_of(0)
    state = {"optim": optimizer.state_dict()}
    return opened(folder, 3).put_snapshot(state, ref="optimizer", group=GROUPS[3], timeout_seconds=TIMEOUT_SECONDS).root


def restore_optimizer(folder: str) -> None:
    _, expected = optimizer_of(0)
    _, optimizer = optimizer_of(1)
    state = {"optim": optimizer.state_dict()}
    opened(folder, 2).checkout("optimizer", into=state, group=GROUPS[2], timeout_seconds=TIMEOUT_SECONDS)
    for number, moments in expected.state_dict()["state"].items():
        for name, moment in moments.items():
            assert torch.equal(state["optim"]["state"][number][name], moment)


def restore_stage(folder: str) -> None:
    """A stage numbers its own parameters from 0."""
    _, optimizer = optimizer_of(0)
    state = optimizer.state_dict()
    own = {"optim": {"state": {number: state["state"][number] for number in (0, 1)}, "param_groups": state["param_groups"]}}
    opened(folder, 2).checkout("optimizer", into=own, group=GROUPS[2], timeout_seconds=TIMEOUT_SECONDS)


def test_numbers_of_parameters_are_those_of_one_layout(pool: Pool, folder: Path) -> None:
    """All ranks mean the same by them, unless they are stages: then the names that no stage takes show it."""
    pool.run(put_optimizer, str(folder), ranks=3)
    pool.run(restore_optimizer, str(folder), ranks=2)
    for error in pool.ask(restore_stage, str(folder), ranks=2):
        assert isinstance(error, tsck.MismatchError)
        assert "6 not expected by `into` on any rank: optim.state.2.step" in str(error)
