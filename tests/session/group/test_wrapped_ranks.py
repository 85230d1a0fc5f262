"""DTensors over quantised tensors: what one layout saves every other one restores, bit by bit, and so does one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tests.session.group.pool import Pool
from tests.session.group.wrappers import (
    RANKS,
    SHAPE,
    WAYS,
    locals_of,
    put_one,
    put_trained,
    refusals,
    register,
    require_equal,
    restore_all,
    restore_trained,
    summary,
    torchao,
    whole,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Of its own: `torchao` replaces what later tests may need."""
    with Pool(RANKS) as pool:
        yield pool


@pytest.mark.parametrize("name", WAYS)
def test_quantised_tensors_of_any_layout_are_restored_on_any_other(pool: Pool, folder: Path, name: str) -> None:
    seed = list(WAYS).index(name)
    pool.run(put_one, str(folder), name, seed, ranks=RANKS)
    pool.run(restore_all, str(folder), name, seed, ranks=RANKS)
    torchao()
    register()
    elements = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE)
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-reader") as store:
        for ref in (name, f"{name}-async"):
            require_equal(store.checkout(ref), locals_of(whole(seed), elements, SHAPE))


def test_replicas_are_stored_once(pool: Pool, folder: Path) -> None:
    pool.run(put_one, str(folder), "rows", 70, ranks=RANKS)
    pool.run(put_one, str(folder), "hsdp", 70, ranks=RANKS)
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-reader") as store:
        first, second = (store.log(name, limit=1)[0] for name in ("rows", "hsdp"))
        assert second.logical_bytes == first.logical_bytes


def test_blocks_across_ranks_are_for_the_same_layout_and_others_are_refused_by_name(pool: Pool, folder: Path) -> None:
    for told in pool.run(refusals, str(folder), ranks=RANKS):
        assert len(told) == 2
        assert "m: " in told[0]
        assert "OptimState4bit" in told[0]
        assert "MismatchError" in told[1]


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_low_bit_optimizers_under_fsdp_go_on_on_fewer_ranks_and_in_one_process(pool: Pool, folder: Path, name: str) -> None:
    torchao()
    put = joined(pool.run(put_trained, str(folder), name, ranks=4))
    assert any(kind.startswith("OptimState") for _, kind, _ in put.values())
    restored = joined(pool.run(restore_trained, str(folder), 2, name, ranks=2))
    same = joined(pool.run(restore_trained, str(folder), 4, name, ranks=4))
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-reader") as store:
        alone = {path: (path, kind, parts) for path, kind, parts in summary(store.checkout(name))}
    for path, (_, kind, parts) in put.items():
        for found in (same, restored, alone):
            assert found[path][1] == kind, path
            for part, tensor in parts.items():
                assert torch.equal(found[path][2][part].view(-1), tensor.view(-1)), f"{path}.{part}"


def joined(ranks: list[list[Any]]) -> dict[str, Any]:
    """What the ranks have one after another: all of it, as they shard the first dim."""
    found = {}
    for same in zip(*ranks, strict=True):
        path, kind, parts = same[0]
        is_whole = path.endswith("step")
        whole = {part: parts[part] if is_whole or part == "qmap" else torch.cat([other[2][part] for other in same]) for part in parts}
        found[path] = (path, kind, whole)
    return found
