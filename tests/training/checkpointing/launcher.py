"""Starts a job of several processes, kills all of them when one is killed, and starts the job again, as launchers do."""

import random
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import tensorstore_ck as tsck
from tests.effort import PATIENCE_SECONDS
from tests.session.group.pool import rank_process
from tests.training.checkpointing.killed_side import DONE, NOT_CONNECTED, REF, Fault, Rank

STARTS = 3
"""Of ranks that gloo does not connect."""


class World(NamedTuple):
    """What one start of a job has."""

    ranks: int
    savers: Sequence[int]
    """Those of which one is killed."""
    options: tuple[Any, ...] = ()
    """What each rank's function gets besides."""


def exit_codes(function: Callable[..., object], folder: Path, world: World, faults: dict[int, Fault]) -> list[int | None]:
    """How each rank ends in one run; when one is killed, so are the others. What ranks noted before is gone.

    `function`: called with a `Rank` and the world's options; `faults`: by rank.
    """
    for _ in range(STARTS):
        ended = _start(function, folder, world, faults)
        if NOT_CONNECTED not in ended:
            return ended
    raise AssertionError(f"gloo did not connect the ranks in {STARTS} starts")


def _start(function: Callable[..., object], folder: Path, world: World, faults: dict[int, Fault]) -> list[int | None]:
    for notes in folder.glob("notes-*"):
        notes.unlink()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    sides = [Rank(number, world.ranks, store.port, str(folder), faults.get(number, Fault())) for number in range(world.ranks)]
    ranks = [rank_process(function, side, *world.options) for side in sides]
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


def run_until_done(
    function: Callable[..., object], folder: Path, worlds: Callable[[int], World], draw: random.Random, *, kills: int, calls: int
) -> int:
    """Starts a job, kills one of its ranks at random, and starts it again, until it ends. Returns how often it was killed.

    `worlds`: for each start, from 0; `calls`: of its backend, at one of which a rank is killed: no more than a whole run makes.

    Raises:
        AssertionError: a run went back behind what was published, or ended otherwise than by a kill.
    """
    safe = killed = 0
    for number in range(kills + 1):
        world = worlds(number)
        faults = {draw.choice(world.savers): Fault("kill", draw.randint(1, calls))} if number < kills else {}
        ended = exit_codes(function, folder, world, faults)
        resumed = noted(folder, "resumed")
        assert all(step >= safe for step in resumed), f"what was published is lost: {resumed} after {safe}"
        assert len(set(resumed)) <= 1, f"ranks resumed from different steps: {resumed}"
        safe = max([safe, *noted(folder, "safe")])
        if ended == [DONE] * world.ranks:
            break
        assert number < kills, f"it did not end well: {ended}, {told(folder)}"
        assert any((code or 0) < 0 for code in ended), f"start {number} on {world} ended without a kill: {ended}, {told(folder)}"
        killed += 1
    with tsck.open(folder / "store", cache_dir=folder / "look") as store:
        assert store.resolve(REF).step == safe
    return killed
