"""Starts a job of several processes, kills all of them when one is killed, and starts the job again, as launchers do."""

import random
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

import tensorstore_ck as tsck
from tests.effort import PATIENCE_SECONDS
from tests.session.group.pool import rank_process
from tests.training.checkpointing.killed_side import DONE, NOT_CONNECTED, REF, Fault, Rank, run

STARTS = 3
"""Of ranks that gloo does not connect."""


def exit_codes(folder: Path, form: str, ranks: int, faults: dict[int, Fault]) -> list[int | None]:
    """How each rank ends in one run; when one is killed, so are the others. What ranks noted before is gone."""
    for _ in range(STARTS):
        ended = _start(folder, form, ranks, faults)
        if NOT_CONNECTED not in ended:
            return ended
    raise AssertionError(f"gloo did not connect the ranks in {STARTS} starts")


def _start(folder: Path, form: str, count: int, faults: dict[int, Fault]) -> list[int | None]:
    for notes in folder.glob("notes-*"):
        notes.unlink()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    sides = [Rank(number, count, store.port, str(folder), faults.get(number, Fault())) for number in range(count)]
    ranks = [rank_process(run, side, form) for side in sides]
    for each in ranks:
        each.start()
    alive = list(ranks)
    try:
        while alive:
            ready = wait([each.sentinel for each in alive], PATIENCE_SECONDS)
            assert ready, f"a rank hangs; {told(folder)}"
            ended = [each for each in alive if each.sentinel in ready]
            alive = [each for each in alive if each not in ended]
            for each in ended:
                each.join()
                for other in alive if (each.exitcode or 0) < 0 or each.exitcode == NOT_CONNECTED else ():
                    other.kill()
    finally:
        for each in alive:
            each.kill()
    return [each.exitcode for each in ranks]


def noted(folder: Path, what: str) -> list[int]:
    """The steps that the ranks of the last run have written down of `what`."""
    return [int(line.rsplit(" ", 1)[1]) for line in _lines(folder) if line.startswith(f"{what} ")]


def told(folder: Path) -> str:
    """What the ranks of the last run ended by."""
    return "; ".join(line for line in _lines(folder) if line.startswith(("ended", "raised"))) or "no rank said why"


def _lines(folder: Path) -> list[str]:
    return [line for notes in sorted(folder.glob("notes-*")) for line in notes.read_text().splitlines()]


def run_until_done(folder: Path, form: str, worlds: Sequence[int], draw: random.Random, *, calls: int) -> int:
    """Starts a job, kills one of its ranks at random, and starts it again, until it ends. Returns how often it was killed.

    `worlds`: the number of ranks of each start; `calls`: of a rank's backend, at one of which it is killed: a whole run makes more.

    Raises:
        AssertionError: a run went back behind what was published, or ended otherwise than by a kill.
    """
    safe = killed = 0
    for number, ranks in enumerate(worlds, start=1):
        is_last = number == len(worlds)
        faults = {} if is_last else {draw.randrange(ranks): Fault("kill", draw.randint(1, calls))}
        ended = exit_codes(folder, form, ranks, faults)
        resumed = noted(folder, "resumed")
        assert all(step >= safe for step in resumed), f"what was published is lost: {resumed} after {safe}"
        assert len(set(resumed)) <= 1, f"ranks resumed from different steps: {resumed}"
        safe = max([safe, *noted(folder, "safe")])
        if ended == [DONE] * ranks:
            break
        assert not is_last, f"it did not end well: {ended}, {told(folder)}"
        assert any((code or 0) < 0 for code in ended), f"start {number} on {ranks} ranks ended without a kill: {ended}, {told(folder)}"
        killed += 1
    with tsck.open(folder / "store", cache_dir=folder / "look") as store:
        assert store.resolve(REF).step == safe
    return killed
