"""Rank states for the ranks that save them, and for other numbers of ranks: whose each takes, and the seeds of new random streams."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.format.part import part_name
from tensorstore_ck.format.record import Record, decode_record, record_name
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.maintenance.copy_store import copy as copy_snapshots
from tensorstore_ck.maintenance.fsck.repair import run_repair
from tests.gc.stores import open_store
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, opened
from tests.session.group.states import Spreading, captured, whole
from tests.session.group.stores import put_all, rank_state

ROOT = "ab" * 32
PUT_BY = 3
WHOSE: dict[str, Callable[[int, int], Any]] = {
    "round": lambda rank, ranks: rank % ranks,
    "several": lambda rank, ranks: range(rank, ranks, 2),
    "wrong": lambda rank, ranks: ranks + rank if rank else 0,
}


def put(folder: str, *, with_own: bool) -> str:
    own = {"rng": torch.get_rng_state(), "rank": torch.distributed.get_rank()} if with_own else None
    ref = "own" if with_own else "shared"
    options: dict[str, Any] = {"group": GROUPS[PUT_BY], "timeout_seconds": TIMEOUT_SECONDS}
    return opened(folder, PUT_BY).put_snapshot({"w": torch.ones(8)}, ref=ref, step=7, rank_state=own, **options).root


def own_state(folder: str, address: str, ranks: int, whose: str | None = None, rank: int | None = None) -> Any:
    return opened(folder, ranks).rank_state(
        address, rank, group=GROUPS[ranks], rank_state_map=None if whose is None else WHOSE[whose], timeout_seconds=TIMEOUT_SECONDS
    )


def ranks_of(found: Any) -> Any:
    return [each["rank"] for each in found] if isinstance(found, list) else found["rank"]


def new_streams(folder: str, address: str, ranks: int) -> tsck.Streams:
    return opened(folder, ranks).random_streams(address, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)


@pytest.fixture(scope="module")
def folder(pool_of_all_tests: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    tsck.open(folder / "store", create=True, cache_dir=folder / "cache").close()
    pool_of_all_tests.resume()
    for with_own in (True, False):
        pool_of_all_tests.run(partial(put, with_own=with_own), str(folder), ranks=PUT_BY)
    return folder


# --- whose state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", [None, "several"])
def test_as_many_ranks_get_their_own(pool: Pool, folder: Path, whose: str | None) -> None:
    """Also when there is a map: it is for other numbers of ranks."""
    assert [ranks_of(own) for own in pool.run(own_state, str(folder), "own", 3, whose, ranks=3)] == [0, 1, 2]


@pytest.mark.parametrize(("ranks", "whose", "expected"), [(2, "several", [[0, 2], [1]]), (8, "round", [0, 1, 2, 0, 1, 2, 0, 1])])
def test_another_number_takes_what_the_map_says(pool: Pool, folder: Path, ranks: int, whose: str, expected: Any) -> None:
    assert [ranks_of(own) for own in pool.run(own_state, str(folder), "own", ranks, whose, ranks=ranks)] == expected


def test_a_rank_may_say_whose(pool: Pool, folder: Path) -> None:
    assert [ranks_of(own) for own in pool.run(own_state, str(folder), "own", 2, None, 1, ranks=2)] == [1, 1]


def test_another_number_without_a_map_gets_an_error_with_advice(pool: Pool, folder: Path) -> None:
    """The error is the mismatch itself on all ranks: an aborted attempt would look as if trying again helped."""
    for error in pool.ask(own_state, str(folder), "own", 2, ranks=2):
        assert isinstance(error, tsck.MismatchError)
        for words in ("has the states of 3 ranks, and there are 2 now", "rank_state_map=", "store.random_streams()", "SampleCursor"):
            assert words in str(error)


def test_none_were_saved(pool: Pool, folder: Path) -> None:
    for error in pool.ask(own_state, str(folder), "shared", 2, "round", ranks=2):
        assert isinstance(error, tsck.NotFoundError)


def test_a_map_that_is_wrong_for_one_rank_fails_on_all(pool: Pool, folder: Path) -> None:
    for error in pool.ask(own_state, str(folder), "own", 2, "wrong", ranks=2):
        assert isinstance(error, tsck.NotFoundError)
        assert "rank 1: NotFoundError: " in str(error)
        assert "there is no rank 4" in str(error)


def test_in_one_process(folder: Path) -> None:
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        assert [store.rank_state("own", rank)["rank"] for rank in range(3)] == [0, 1, 2]
        assert ranks_of(store.rank_state("own", rank_state_map=lambda _, ranks: range(ranks))) == [0, 1, 2]
        with pytest.raises(tsck.MismatchError, match="there are 1 now"):
            store.rank_state("own")
        with pytest.raises(tsck.NotFoundError, match="no rank 3"):
            store.rank_state("own", 3)
        with pytest.raises(tsck.InvalidOptionError, match="rank_state= needs group="):
            store.put_snapshot({}, ref="lost", rank_state={"rng": 1})
        assert "lost" not in store.branches()


# --- new streams --------------------------------------------------------------------------------------------------------


def test_the_rule_never_changes() -> None:
    """What FORMAT.md says, and what runs rely on that have gone on so."""
    streams = tsck.Streams(ROOT, 3, 8)
    assert (streams.seed("torch"), streams.seed("numpy")) == (11697963444123217464, 5394771470544323794)
    assert streams.rule == "blake3-v1"


def test_each_stream_is_another() -> None:
    roots, ranks, sizes, names = (ROOT, "cd" * 32), range(4), (4, 5), ("python", "numpy", "torch", "")
    seeds = {tsck.Streams(root, rank, size).seed(name) for root, rank, size, name in itertools.product(roots, ranks, sizes, names)}
    assert len(seeds) == 2 * 4 * 2 * 4


def test_generators_take_the_seeds() -> None:
    for seed in [tsck.Streams(ROOT, rank, 8).seed("x") for rank in range(8)]:
        assert 0 <= seed < 1 << 64
        assert torch.Generator().manual_seed(seed).initial_seed() == seed
        np.random.default_rng(seed)


def test_all_ranks_derive_from_the_same_snapshot(pool: Pool, folder: Path) -> None:
    for address in ("own", "shared"):
        found = pool.run(new_streams, str(folder), address, 8)
        with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
            root = store.resolve(address).root
            assert store.random_streams(address) == tsck.Streams(root, 0, 1)
        assert found == [tsck.Streams(root, rank, 8) for rank in range(8)]
        assert len({streams.seed("torch") for streams in found}) == 8


def test_a_rule_of_a_newer_build_is_refused() -> None:
    with pytest.raises(tsck.FormatVersionError, match="'blake3-v2', which needs a newer build"):
        tsck.Streams(ROOT, 0, 1, "blake3-v2")


# --- the record ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_with_rank_states_names_the_rule_and_a_copy_and_a_repair_keep_it() -> None:
    backend, other = MemoryBackend(), MemoryBackend()
    open_store(backend)
    open_store(other)

    def record_of(info: SnapshotRow) -> Record:
        return decode_record(backend.get(record_name(info.ulid), max_bytes=1 << 20), "record")

    tensors = {"same": Spreading(whole((10, 1000)), None)}
    without = put_all(backend, 2, lambda rank: captured(tensors, [], rank, 2, []), ref="without")
    assert record_of(without).streams == ""
    assert b"streams" not in backend.get(record_name(without.ulid), max_bytes=1 << 20), "as it ever was"
    info = put_all(backend, 2, lambda rank: captured(tensors, [], rank, 2, []), rank_state)
    assert record_of(info).streams == "blake3-v1"
    newer = record_of(info)._replace(streams="blake3-v2")
    assert decode_record(newer.encode(), "record") == newer
    copy_snapshots(open_store(backend), open_store(other))
    (copied,) = open_store(other).log("job")
    assert open_store(other).random_streams(copied.root) == open_store(backend).random_streams(info.root.hex())
    copies = [decode_record(other.get(each.name, max_bytes=1 << 20), "copy") for each in other.list("snapshots/")]
    assert {each.streams for each in copies} == {"blake3-v1", ""}
    backend.delete([part_name(record_of(info).parts[2])])
    assert run_repair(open_store(backend).engine, other=open_store(other).engine).ok
    assert open_store(backend).fsck(read_data=True).ok
    assert record_of(info).streams == "blake3-v1"
