"""What DCP would silently accept is reported: ranks with different copies under one name, and ties that torch broke."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tensorstore_ck.engine.write.suspicious_save import SuspiciousSaveWarning
from tensorstore_ck.integrations.dcp import Reader, Writer
from tensorstore_ck.state.load_report import LoadWarning
from tests.session.group.pool import GROUPS, Pool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OWN_NAME = "own name"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Of its own: groups that not all ranks of a pool make would keep it from later tests."""
    with Pool(4) as pool:
        yield pool


class Planner(DefaultSavePlanner):
    """Of a class of its own, as DCP keeps plans by its name."""


def told(caught: list[warnings.WarningMessage], kind: type[Warning]) -> list[str]:
    return [str(each.message) for each in caught if each.category is kind]


def save_on_rank(folder: str, differ: list[list[str]], cached: bool) -> list[list[str]]:
    """Saves once for each of `differ`, the names of which this rank has another copy then than the others; what it was warned of."""
    rank = dist.get_rank()
    writer = Writer(f"{folder}/store", "job", cache_dir=f"{folder}/cache-{rank}", unchanged="ok")
    said = []
    for step, names in enumerate(differ, 1):
        state: dict[str, Any] = {"mean": torch.ones(8), "large": torch.ones(5000), "seed": [1], "lr": 0.1, "same": {"x": torch.ones(3)}}
        for name in names:
            if name == OWN_NAME:
                state[f"rng.{rank}"] = torch.full((4,), float(rank))
            elif isinstance(state[name], torch.Tensor):
                state[name][-1] = rank // 2
            else:
                state[name] = [rank // 2]
        planner = Planner(enable_plan_caching=cached)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dcp.save(state, storage_writer=writer, checkpoint_id=f"step-{step}", planner=planner, process_group=GROUPS[4])
        said.append(told(caught, SuspiciousSaveWarning))
    return said


def test_copies_that_differ_are_named_with_their_ranks(pool: Pool, tmp_path: Path) -> None:
    said, *others = pool.run(save_on_rank, str(tmp_path), [["mean", "seed", "large"], ["mean", "lr"], [OWN_NAME]], False, ranks=4)
    assert others == [[[], [], []]] * 3
    (first,), (second,), third = said
    assert first.startswith("job@1: ranks have different copies under one name")
    for name in ("mean", "seed", "large"):
        winner, differ = first.split(f"'{name}': that of rank ")[1].split(", not that of ranks ", 1)
        assert differ.startswith("2-3" if winner in "01" else "0-1"), name
    assert "'lr'" in second
    assert "'mean'" not in second  # reported before
    assert third == []


def test_larger_tensors_are_looked_at_in_turns(pool: Pool, tmp_path: Path) -> None:
    """Also where DCP takes the plans from its cache."""
    said, *_ = pool.run(save_on_rank, str(tmp_path), [[]] * 3 + [["large"]] * 6, True, ranks=4)
    assert said[:3] == [[], [], []]
    found = [(step, text) for step, texts in enumerate(said, 1) for text in texts]
    assert len(found) == 1
    assert found[0][0] > 4  # else each save would hash it
    assert "'large': that of rank" in found[0][1]


def save_value(folder: str) -> bool:
    cache = Path(folder) / f"cache-{dist.get_rank()}"
    dcp.save({"step": 1}, storage_writer=Writer(f"{folder}/store", "job", cache_dir=cache), process_group=GROUPS[4])
    return cache.exists()


def test_a_rank_without_anything_to_write_opens_no_store(pool: Pool, tmp_path: Path) -> None:
    opened = pool.run(save_value, str(tmp_path), ranks=4)
    assert opened[0]
    assert sum(opened) <= 2  # the coordinator, and the one that DCP made the writer


class Model(nn.Module):
    """With a head that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(tokens))  # type: ignore[no-any-return]


def save_untied(folder: str) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Model()
    plan = {"emb": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    assert model.emb.weight is not model.head.weight  # torch's doing
    with torch.no_grad():
        model.head.weight.add_(1)
    state = get_model_state_dict(model)
    dcp.save(state, storage_writer=Writer(f"{folder}/store", "job", cache_dir=f"{folder}/cache-{dist.get_rank()}"), process_group=GROUPS[4])
    return {name: value.full_tensor() for name, value in state.items() if isinstance(value, DTensor)}


def load_tied(folder: str, tied: bool) -> tuple[list[str], dict[str, Any]]:
    model = Model()
    if not tied:
        model.head.weight = nn.Parameter(torch.empty(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,))) if dist.is_initialized() else None
    state = get_model_state_dict(model)
    group = GROUPS[2] if dist.is_initialized() else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load(state, storage_reader=Reader(f"{folder}/store", "job", cache_dir=f"{folder}/cache-0"), process_group=group)
    found = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    return told(caught, LoadWarning), found


def test_a_tie_that_torch_broke_is_named_where_it_is_whole(pool: Pool, tmp_path: Path) -> None:
    saved, *_ = pool.run(save_untied, str(tmp_path), ranks=4)
    for said, found in (*pool.run(load_tied, str(tmp_path), True, ranks=2), load_tied(str(tmp_path), True)):
        assert len(said) == 1
        assert "'emb.weight', 'head.weight' (now that of 'head.weight')" in said[0]
        assert torch.equal(found["emb.weight"], saved["head.weight"])
    for said, found in (*pool.run(load_tied, str(tmp_path), False, ranks=2), load_tied(str(tmp_path), False)):
        assert said == []
        assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_a_tie_that_is_whole_on_both_sides(tmp_path: Path) -> None:
    model = Model()
    dcp.save(get_model_state_dict(model), storage_writer=Writer(f"{tmp_path}/store", "job", cache_dir=tmp_path / "cache-0"), no_dist=True)
    said, found = load_tied(str(tmp_path), True)
    assert said == []
    assert torch.equal(found["emb.weight"], model.emb.weight)
