"""What cannot be right is refused before a byte is written, on all ranks, with its path, the ranks and the two things that differ."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import tensorstore_ck as tsck
from tests.session.group.pool import TIMEOUT_SECONDS
from tests.training.recipes.harness import Worlds, mesh_of, opened

pytestmark = pytest.mark.slow

RANKS = 4
ODD = 2
"""The rank that comes with something else."""


def spread(dtype: torch.dtype = torch.float32, rows: int = 8, columns: int = 4, placement: Placement | None = None) -> DTensor:
    shape = (rows, columns)
    mesh = mesh_of(dp=RANKS)
    share = torch.ones(shape, dtype=dtype)
    placement = placement or Shard(0)
    if isinstance(placement, Shard):
        share = share.chunk(RANKS, placement.dim)[dist.get_rank()].contiguous()
    return DTensor.from_local(share, mesh, [placement], run_check=False)


def odd(this: Callable[[], Any], others: Callable[[], Any]) -> Any:
    return (this if dist.get_rank() == ODD else others)()


def flat(*starts: int, size: int) -> tsck.FlatShard:
    return tsck.FlatShard(torch.ones(size), (10, 2), starts[dist.get_rank()])


NOTHING = "nothing"
CASES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "dtype of a shard": (lambda: odd(lambda: spread(torch.float64), spread), ["rank 2", "float64", "float32"]),
    "shape of a sharded tensor": (lambda: odd(lambda: spread(rows=12), spread), ["rank 2", "12, 4", "8, 4"]),
    "another split": (lambda: odd(lambda: spread(placement=Shard(1)), spread), ["rank 2"]),
    "replicated on one rank": (lambda: odd(lambda: spread(placement=Replicate()), spread), ["rank 2"]),
    "a mesh's rank without it": (lambda: odd(lambda: NOTHING, spread), ["rank 2"]),
    "shape of a plain tensor": (lambda: odd(lambda: torch.ones(4), lambda: torch.ones(5)), ["rank 2", "4", "5"]),
    "dtype of a plain tensor": (lambda: odd(lambda: torch.ones(5).half(), lambda: torch.ones(5)), ["rank 2", "float16", "float32"]),
    "a plain tensor beside shards": (lambda: odd(lambda: torch.ones(8, 4), spread), ["rank 2"]),
    "a value": (lambda: odd(lambda: 0.1, lambda: 0.25), ["rank 2", "0.1", "0.25"]),
    "a text": (lambda: odd(lambda: "one", lambda: "two"), ["rank 2", "'one'", "'two'"]),
    "a value's type": (lambda: odd(lambda: 1, lambda: True), ["rank 2", "1", "True"]),
    "a value and a tensor": (lambda: odd(lambda: 1, lambda: torch.tensor(1)), ["rank 2"]),
    "a dict and a list": (lambda: odd(lambda: {"0": 1}, lambda: [1]), ["rank 2"]),
    "lengths of lists": (lambda: odd(lambda: [1], lambda: [1, 2]), ["rank 2"]),
    "boxes that overlap": (lambda: flat(0, 5, 8, 15, size=5), ["ranks 1-2"]),
    "a gap between boxes": (lambda: flat(0, 5, 10, 15, size=4), ["4 of 20"]),
}
"""Name -> what lies at ``model.w`` on each rank (nothing: it is left out), and what the error says on all ranks, besides that path."""

GOOD: dict[str, Callable[[], Any]] = {"alone": dict, "beside shards": lambda: {"other": spread(), "same": torch.ones(3), "epoch": 1}}


def refused(folder: str, case: str, beside: str) -> tuple[type, str]:
    at_w = CASES[case][0]()
    state = {"model": {**GOOD[beside](), **({} if at_w is NOTHING else {"w": at_w})}}
    return error_of(folder, "refused", state)


def error_of(folder: str, ref: str, state: Any) -> tuple[type, str]:
    try:
        put(folder, ref, state)
    except tsck.StoreError as exc:
        return type(exc), str(exc)
    raise AssertionError("it was not refused")


def put(folder: str, ref: str, state: Any) -> None:
    opened(folder).put_snapshot(state, ref=ref, group=dist.group.WORLD, timeout_seconds=TIMEOUT_SECONDS)


def put_good(folder: str, ref: str) -> None:
    put(folder, ref, GOOD["beside shards"]())


def written(folder: Path) -> set[Path]:
    return {path for name in ("packs", "parts", "snapshots") for path in (folder / "store" / name).rglob("*") if path.is_file()}


@pytest.mark.parametrize(("case", "beside"), [*zip(CASES, itertools.cycle(GOOD))])
def test_refused(worlds: Worlds, recipes_folder: Path, case: str, beside: str) -> None:
    before = written(recipes_folder)
    errors = worlds.run(RANKS, refused, str(recipes_folder), case, beside)
    problems = ["something was written"] if written(recipes_folder) != before else []
    for kind, said in set(errors):
        missing = [text for text in ["model.w", *CASES[case][1]] if text not in said]
        if missing or not issubclass(kind, tsck.UnsupportedValueError | tsck.MismatchError):
            problems.append(f"{missing} are missing in {kind.__name__}: {said}")
    assert not problems, "; ".join(problems)
    worlds.run(RANKS, put_good, str(recipes_folder), f"after-{beside}".replace(" ", "-"))


def put_other_numbers(folder: str) -> tuple[type, str]:
    return error_of(folder, "other-numbers", {"model": {"other": spread(), "w": torch.full((5,), float(dist.get_rank() == ODD))}})


def test_plain_tensors_of_other_numbers(worlds: Worlds, recipes_folder: Path) -> None:
    """Found when they are read: nothing is visible."""
    for kind, said in worlds.run(RANKS, put_other_numbers, str(recipes_folder)):
        assert issubclass(kind, tsck.UnsupportedValueError | tsck.MismatchError), f"{kind.__name__}: {said}"
        assert "model.w" in said
        assert "rank 2" in said
    with tsck.open(recipes_folder / "store", cache_dir=recipes_folder / "cache") as store:
        assert "other-numbers" not in store.branches()
