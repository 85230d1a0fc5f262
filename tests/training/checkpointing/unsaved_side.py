"""What each rank of the pool does in the tests of saves that fail."""

import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tests.effort import PATIENCE_SECONDS
from tests.end_to_end.crash.faulty import Faults, FaultyBackend
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS

LEAD_STEPS = 3
SECONDS_A_STEP = 10.0


def run(folder: str, trouble: str, asynchronous: bool, ranks: int) -> tuple[int, str, str]:
    """A job of 40 steps, with trouble on rank 1 from the second save on: after which step it ended, and with what."""
    rank, group, faults = dist.get_rank(), GROUPS[ranks], Faults()
    now = [0.0]
    state: dict[str, Any] = {"w": torch.zeros(2000)}
    store = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}", codec="raw")
    store.engine.backend = FaultyBackend(store.engine.backend, faults, atomic_put=False)
    gate = threading.Event()
    gate.set()
    write = store.engine.backend.put

    def put(*args: Any, **options: Any) -> Any:
        gate.wait(PATIENCE_SECONDS)
        return write(*args, **options)

    store.engine.backend.put = put  # type: ignore[method-assign]
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
            timeout_seconds=TIMEOUT_SECONDS,
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
                if trouble == "two saves are slow":
                    now[0] += 200.0 if step == 9 else 0.0
                    gate.clear() if rank == 1 and step in (8, 20) else gate.set() if step in (10, 22) else None
                is_ahead = trouble == "one rank is a step ahead once" and (rank, step) == (1, 8)
                is_slow = trouble == "two saves are slow" and step in (8, 20)
                ckpt.step(step + is_ahead)
                if asynchronous and (step in (10, 22) or (step % 4 == 0 and not is_slow)):
                    store.session.queue.wait_idle()  # what came of it is known by the next step
            ckpt.close()
        except tsck.StoreError as exc:
            error = exc
    faults.mode = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.close()
    return step, "" if error is None else type(error).__name__, "" if error is None else str(error)


def without_a_board(folder: str) -> tuple[int, str]:
    """A job whose process group's store is away from step 20 on: after which step it ended, and with what."""
    now, is_away = [0.0], [False]
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache") as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = store.session.groups.runner(GROUPS[1])

        def run(action: Any, seconds: float) -> Any:
            if is_away[0]:
                raise RuntimeError("injected: connection reset")
            return runner(action, seconds)

        store.session.groups.of(GROUPS[1])[0].run = run
        options: dict[str, Any] = {"unchanged": "ok", "max_unsaved_seconds": 120.0, "lead_steps": 1, "clock": lambda: now[0]}
        when = tsck.every_seconds(30, clock=options["clock"])
        ckpt = tsck.Checkpointer(store, {"w": torch.zeros(9)}, ref="job", when=when, group=GROUPS[1], **options)
        for step in range(1, 101):
            now[0] += SECONDS_A_STEP
            if step == 20:  # all saves before are published
                store.session.queue.wait_idle()
            is_away[0] = step >= 20
            try:
                ckpt.step(step)
            except tsck.StoreError as exc:
                return step, str(exc)
    return 0, ""
