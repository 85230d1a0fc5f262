"""What each rank of the pool does in the tests of saves that fail."""

import warnings
from typing import Any

import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tests.crash.faulty import Faults, FaultyBackend
from tests.ranks.pool import GROUPS

LEAD_STEPS = 3
SECONDS_A_STEP = 10.0


def run(folder: str, trouble: str, asynchronous: bool, ranks: int) -> tuple[int, str, str]:
    """A job of 40 steps, with trouble on rank 1 from the second save on: after which step it ended, and with what."""
    rank, group, faults = dist.get_rank(), GROUPS[ranks], Faults()
    now = [0.0]
    state: dict[str, Any] = {"w": torch.zeros(2000)}
    store = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}", codec="raw")
    store.engine.backend = FaultyBackend(store.engine.backend, faults, atomic_put=False)
    step = 0
    error: BaseException | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt = tsck.Checkpointer(
            store,
            state,
            ref="job",
            when=tsck.every_steps(4),
            group=group,
            asynchronous=asynchronous,
            lead_steps=LEAD_STEPS,
            max_unsaved_seconds=120.0,
            timeout_seconds=10.0,
            unchanged="ok",
            clock=lambda: now[0] if rank == 0 else 0.0,  # what other clocks say does not count
        )
        try:
            for step in range(1, 41):
                dist.barrier(group)
                now[0] += SECONDS_A_STEP
                state["w"] += step
                if rank == 1 and step == 7 and trouble == "one rank's state is refused":
                    state["thing"] = object()
                if rank == 1 and step in (7, 13) and "away" in trouble:
                    is_over = step == 13 and "long" not in trouble
                    faults.mode, faults.at, faults.persistent = ("", 0, False) if is_over else ("unavailable", faults.calls + 1, True)
                ckpt.step(step)
                if asynchronous and step % 4 == 0:
                    store._saver.settle()  # what came of it is known by the next step
            ckpt.close()
        except tsck.StoreError as exc:
            error = exc
    faults.mode = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.close()
    return step, "" if error is None else type(error).__name__, "" if error is None else str(error)
