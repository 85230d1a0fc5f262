"""Training states as `get_state_dict` gives them, through DCP on ranks of several parallelisms, and what else real jobs save."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Reader, Writer
from tests.integrations.dcp.dcp_states import clear_plan_cache, difference
from tests.session.group.pool import GROUPS, RANKS, Pool, make_store, opened
from tests.session.group.test_parallel_models import KINDS, gathered, require_same, side_of, training

PAIRS = list(zip(KINDS, [*list(KINDS)[1:], *KINDS], strict=False))
"""What saves, and what loads: each once."""

# --- models and optimizers ----------------------------------------------------------------------------------------------


def save_and_load_training(folder: str, kind: str, loading: str) -> tuple[Any, Any]:
    """The whole state, and what ranks of the kind `loading` hold after they loaded it."""
    saved = side_of(*training(kind, 1))
    dcp.save(saved, storage_writer=Writer(opened(folder, RANKS), kind.replace(" ", "-")))
    model, optimizer = training(loading, 2)
    state = side_of(model, optimizer)
    groups = state["optim"].pop("param_groups") if loading == "fsdp1" else []  # DCP cannot load them where a rank has no parameters
    dcp.load(state, storage_reader=Reader(opened(folder, RANKS), kind.replace(" ", "-")))
    if groups:
        state["optim"]["param_groups"] = groups
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return gathered(saved), gathered(side_of(model, optimizer))


@pytest.mark.parametrize(
    ("kind", "loading"),
    [(kind, loading) if kind == "fsdp2" else pytest.param(kind, loading, marks=pytest.mark.slow) for kind, loading in PAIRS],
)
def test_models_and_optimizers(pool: Pool, folder: Path, kind: str, loading: str) -> None:
    expected, loaded = pool.run(save_and_load_training, str(folder), kind, loading)[0]
    assert expected["optim"]["state"]["0.weight"]["exp_avg"].any()
    require_same(loaded, expected)
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        require_same(store.checkout(kind.replace(" ", "-")), expected)


# --- ranks with keys of their own ---------------------------------------------------------------------------------------


def own_keys(rank: int, seed: int) -> dict[str, Any]:
    """As in pipelines: layers of some ranks only; and each rank's own state."""
    stage = rank // 2
    mesh = DeviceMesh("cpu", torch.tensor([2 * stage, 2 * stage + 1]), _init_backend=False)
    weight = torch.arange(35.0).view(7, 5) + 100 * stage + seed
    return {
        "model": {
            f"layers.{stage}.w": distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None),
            f"layers.{stage}.b": distribute_tensor(weight[0].clone(), mesh, [Replicate()], src_data_rank=None),
        },
        f"dp_rank_{rank}": {"rng": torch.full((3,), float(rank + seed)), "position": [rank, (seed, "x")], "nested": [{"a": rank}]},
        "step": seed,
    }


def save_and_load_own_keys(folder: str) -> None:
    """With planners of several options, the last one twice, since it then takes its plans from its cache."""
    rank, store = dist.get_rank(), opened(folder, 4)
    cached = DefaultSavePlanner(enable_plan_caching=True)
    for seed, planner in enumerate((None, DefaultSavePlanner(dedup_save_to_lowest_rank=True), cached, cached)):
        dcp.save(own_keys(rank, seed), storage_writer=Writer(store, "own"), process_group=GROUPS[4], planner=planner)
        found = own_keys(rank, -1)
        dcp.load(found, storage_reader=Reader(store, "own"), process_group=GROUPS[4])
        assert difference(own_keys(rank, seed), found) is None
    clear_plan_cache()


def load_strangers_keys(folder: str) -> str:
    """A rank of another job size asks for what nobody saved."""
    rank = dist.get_rank()
    found = {f"dp_rank_{rank}": {"rng": torch.zeros(3), "position": None}}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, storage_reader=Reader(opened(folder, 8), "own"), planner=planner)
    return str(found[f"dp_rank_{rank}"]["position"])


def test_ranks_with_keys_of_their_own(pool: Pool, tmp_path: Path) -> None:
    make_store(tmp_path)
    pool.run(save_and_load_own_keys, str(tmp_path), ranks=4)
    answers = pool.run(load_strangers_keys, str(tmp_path))
    assert answers == [str([rank, (3, "x")]) if rank < 4 else "None" for rank in range(8)]
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
        found = store.checkout("own")
        assert torch.equal(found["model"]["layers.1.w"], torch.arange(35.0).view(7, 5) + 103)
        assert [found[f"dp_rank_{rank}"]["nested"] for rank in range(4)] == [[{"a": rank}] for rank in range(4)]


# --- ranks that do not go together --------------------------------------------------------------------------------------

APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "value and dict": ({"x": 5}, {"x": {"a": 1, "b": {"c": 2}}}),
    "dict and value": ({"x": {"a": 1}}, {"x": 5}),
    "tensor and dict": ({"x": torch.ones(3)}, {"x": {"a": torch.zeros(2)}}),
    "empty list and list": ({"x": []}, {"x": [{"a": 1}, {"b": torch.ones(2)}]}),
    "list and empty list": ({"x": [{"a": 1}]}, {"x": []}),
    "list and dict": ({"x": [torch.ones(2), 1]}, {"x": {"0": torch.ones(2), "k": 1}}),
    "dots and a dict": ({"a.b": 1}, {"a": {"b": 1, "c": 3}}),
}
"""DCP's flat names allow both."""


def save_apart(folder: str) -> None:
    for kind, states in APART.items():
        state = states[dist.get_rank()]
        dcp.save(state, storage_writer=Writer(opened(folder, 2), kind.replace(" ", "-")), process_group=GROUPS[2])
        dcp.save(state, storage_writer=FileSystemWriter(f"{folder}/{kind}", sync_files=False), process_group=GROUPS[2])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_whose_states_are_of_other_forms(pool: Pool, tmp_path: Path) -> None:
    """As of optimizers, of which a rank without parameters has no groups."""
    make_store(tmp_path)
    pool.run(save_apart, str(tmp_path), ranks=2)
    for kind in APART:
        flat = []
        for reader in (Reader(tmp_path / "store", kind.replace(" ", "-")), FileSystemReader(tmp_path / kind)):
            metadata = reader.read_metadata()
            names = metadata.state_dict_metadata
            flat.append({fqn: torch.zeros(entry.size) if isinstance(entry, TensorStorageMetadata) else 0 for fqn, entry in names.items()})
            dcp.load(flat[-1], storage_reader=reader, planner=Flat(), no_dist=True)
        assert difference(flat[1], {fqn: flat[0][fqn] for fqn in flat[1]}) is None, kind
        assert len(flat[0]) == len(flat[1]), kind


class Flat(DefaultLoadPlanner):
    """Takes values by their flat names."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=False)


# --- the planner's cache, when one rank's plan changes ------------------------------------------------------------------


def save_cached(folder: str, changed_rank: int | None, value: int) -> None:
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", torch.arange(3), _init_backend=False)
    state: dict[str, Any] = {
        "w": distribute_tensor(torch.full((7, 5), float(value)), mesh, [Shard(0)], src_data_rank=None),
        "both": torch.full((40,), float(value)),
        f"own_{rank}": [value, rank],
        "step": value,
    }
    if changed_rank == rank:
        state["new"] = {"t": torch.full((3,), float(value)), "v": value}
    writer = Writer(f"{folder}/store", "cached", cache_dir=f"{folder}/cache-{rank}")
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state, storage_writer=writer, planner=planner, process_group=GROUPS[3])


def test_cached_plans(pool: Pool, tmp_path: Path) -> None:
    """Nothing changed, one rank's plan changed, and changed back."""
    try:
        with_new = [(None, False), (None, False), (2, True), (2, True), (0, True), (None, False)]
        for value, (changed_rank, is_new) in enumerate(with_new):
            pool.run(save_cached, str(tmp_path), changed_rank, value, ranks=3)
            with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache-0") as store:
                found = store.checkout("cached")
                assert torch.equal(found["w"], torch.full((7, 5), float(value)))
                assert torch.equal(found["both"], torch.full((40,), float(value)))
                assert [found[f"own_{rank}"] for rank in range(3)] == [[value, rank] for rank in range(3)]
                assert ("new" in found) == is_new
                assert found.get("new", {"v": value})["v"] == value
                assert store.fsck(read_data=True).ok
    finally:
        pool.run(clear_plan_cache)


# --- tensors that are not there yet -------------------------------------------------------------------------------------


def load_into_meta(folder: str) -> None:
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False)
    full = torch.arange(35.0).view(7, 5)
    state: dict[str, Any] = {"w": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None), "b": full[0].clone()}
    dcp.save(state, storage_writer=Writer(f"{folder}/store", "meta"), process_group=GROUPS[2])
    local = torch.empty_like(state["w"].to_local(), device="meta")
    target: dict[str, Any] = {
        "w": DTensor.from_local(local, mesh, [Shard(0)], shape=full.shape, stride=(5, 1)),
        "b": torch.empty(5, device="meta"),
    }
    dcp.load(target, storage_reader=Reader(f"{folder}/store", "meta"), process_group=GROUPS[2])
    assert difference(state, target) is None


def test_meta_tensors(pool: Pool, tmp_path: Path) -> None:
    pool.run(load_into_meta, str(tmp_path), ranks=2)


def without_ranks(folder: str) -> None:
    """In a job of several ranks, one saves and loads alone."""
    if dist.get_rank() == 1:
        dcp.save({"a": torch.ones(3), "b": 2}, storage_writer=Writer(f"{folder}/store", "alone"), no_dist=True)
        found = {"a": torch.zeros(3), "b": 0}
        dcp.load(found, storage_reader=Reader(f"{folder}/store", "alone"), no_dist=True)
        assert difference({"a": torch.ones(3), "b": 2}, found) is None


def test_one_rank_without_the_others(pool: Pool, tmp_path: Path) -> None:
    pool.run(without_ranks, str(tmp_path), ranks=2)
