"""A job that is killed again and again, or whose store fails: it goes on from what was safe, or ends; it never only looks healthy."""

import multiprocessing
import random
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch.distributed as dist

import tensorstore_ck as tsck
from tests.cadence.killed_side import DONE, RANKS, STEPS, run
from tests.ranks.pool import IMPORTED, make_store

SECONDS = 60.0


def codes(folder: Path, modes: list[str], ats: list[int]) -> list[int | None]:
    """How each rank ends in one run; when one is killed, so are the others, as a launcher does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ranks = [context.Process(target=run, args=(str(folder), rank, store.port, modes[rank], ats[rank])) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    alive = list(ranks)
    while alive:
        ready = wait([each.sentinel for each in alive], SECONDS)
        assert ready, "a rank hangs"
        ended = [each for each in alive if each.sentinel in ready]
        alive = [each for each in alive if each not in ended]
        for each in ended:
            each.join()
            for other in alive if (each.exitcode or 0) < 0 else ():
                other.kill()
    return [each.exitcode for each in ranks]


def noted(folder: Path, what: str) -> list[int]:
    lines = [line for rank in range(RANKS) for line in (folder / f"notes-{rank}").read_text().splitlines()]
    return [int(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(what)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_is_killed_goes_on_from_what_was_safe(tmp_path: Path) -> None:
    make_store(tmp_path)
    draw = random.Random(18)
    safe = 0
    for number in range(12):
        victim = draw.randrange(RANKS)
        modes = ["kill" if rank == victim and number < 5 else "" for rank in range(RANKS)]
        ended = codes(tmp_path, modes, [draw.randrange(5, 60)] * RANKS)
        resumed = noted(tmp_path, "resumed")
        if len(resumed) >= RANKS:
            assert resumed[-1] >= safe, "what was published is not lost"
        safe = max([safe, *noted(tmp_path, "safe")])
        if ended == [DONE] * RANKS:
            break
        assert number < 5, ended
    assert safe == STEPS
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "look") as store:
        assert store.resolve("job").step == STEPS


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("broken", range(RANKS))
def test_a_job_whose_store_stays_away_on_one_rank_ends(tmp_path: Path, broken: int) -> None:
    """Each rank ends by itself, and says why, long before the last step."""
    make_store(tmp_path)
    modes = ["unavailable" if rank == broken else "" for rank in range(RANKS)]
    ended = codes(tmp_path, modes, [20] * RANKS)
    assert DONE not in ended
    assert all(code is not None and code > 0 for code in ended), ended
    told = [line for rank in range(RANKS) for line in (tmp_path / f"notes-{rank}").read_text().splitlines() if line.startswith("ended by")]
    assert len(told) == RANKS
