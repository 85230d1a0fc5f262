"""State dicts of ranks that `tests.session.group` lacks: quantised weights under tensor parallelism, shards that do not fit together.

What one parallelism saves every other one restores: see `test_parallel_models`, `test_reshard`, `test_pipelines`, `test_united` and
`test_wrapped_ranks` there.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import tensorstore_ck as tsck
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, opened

pytestmark = pytest.mark.slow

RANKS = 4
ODD = 2
"""The rank that comes with something else."""


def put(folder: str, ranks: int, ref: str, state: Any) -> None:
    opened(folder, ranks).put_snapshot(state, ref=ref, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)


# --- quantised weights ------------------------------------------------------------------------------------------------


def quantised(ranks: int, seed: int) -> torch.Tensor:
    """Split, then quantised: a wrapper whose inner tensors are DTensors."""
    import torchao.quantization

    torch.manual_seed(seed)
    model = nn.Linear(8, 32)
    parallelize_module(model, DeviceMesh.from_group(GROUPS[ranks], "cpu"), ColwiseParallel(output_layouts=Replicate()))
    torchao.quantization.quantize_(model, torchao.quantization.Int8WeightOnlyConfig())
    return model.weight


def inner(weight: Any) -> dict[str, torch.Tensor]:
    found = {name: getattr(weight, name) for name in weight.__tensor_flatten__()[0]}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def put_quantised(folder: str) -> dict[str, torch.Tensor]:
    weight = quantised(RANKS, 1)
    put(folder, RANKS, "int8", {"w": weight})
    return inner(weight)


def restore_quantised(folder: str, ranks: int) -> dict[str, torch.Tensor]:
    weight = quantised(ranks, 2)
    opened(folder, ranks).checkout("int8", into={"w": weight}, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
    return inner(weight)


@pytest.mark.filterwarnings("ignore")  # of torchao's import
def test_quantised_weights_under_tensor_parallelism(pool: Pool, folder: Path) -> None:
    expected = pool.run(put_quantised, str(folder), ranks=RANKS)[0]
    restored = [each for ranks in (RANKS, 2) for each in pool.run(restore_quantised, str(folder), ranks, ranks=ranks)]
    importlib.import_module("torchao.quantization")
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        restored.append(inner(store.checkout("int8")["w"]))
    for found in restored:
        assert found.keys() == expected.keys()
        assert all(torch.equal(each, expected[name]) for name, each in found.items())


# --- shards that do not fit together ----------------------------------------------------------------------------------


def spread(dtype: torch.dtype = torch.float32, rows: int = 8, placement: Placement | None = None) -> DTensor:
    share = torch.ones((rows, 4), dtype=dtype)
    placement = placement or Shard(0)
    if isinstance(placement, Shard):
        share = share.chunk(RANKS, placement.dim)[dist.get_rank()].contiguous()
    return DTensor.from_local(share, DeviceMesh.from_group(GROUPS[RANKS], "cpu"), [placement], run_check=False)


ODDITIES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "dtype": (lambda: spread(torch.float64), ["float64", "float32"]),
    "shape": (lambda: spread(rows=12), ["12, 4", "8, 4"]),
    "split": (lambda: spread(placement=Shard(1)), []),
    "replicated": (lambda: spread(placement=Replicate()), []),
    "plain": (lambda: torch.ones(8, 4), []),
}


def refused(folder: str, name: str) -> str:
    at_w = ODDITIES[name][0]() if dist.get_rank() == ODD else spread()
    try:
        put(folder, RANKS, "refused", {"model": {"w": at_w, "other": spread()}})
    except (tsck.UnsupportedValueError, tsck.MismatchError) as exc:
        return str(exc)
    raise AssertionError("it was not refused")


def written(folder: Path) -> set[Path]:
    return {path for name in ("packs", "parts", "snapshots") for path in (folder / "store" / name).rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ODDITIES)
def test_a_shard_that_does_not_fit_is_refused_on_all_ranks(pool: Pool, folder: Path, name: str) -> None:
    """Before a byte is written, with its path and the rank."""
    before = written(folder)
    for said in pool.run(refused, str(folder), name, ranks=RANKS):
        assert not [each for each in ("model.w", f"rank {ODD}", *ODDITIES[name][1]) if each not in said], said
    assert written(folder) == before
