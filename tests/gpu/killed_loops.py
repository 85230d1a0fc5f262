"""Loops on a device that are killed at random times: `python -m tests.gpu.killed_loops FOLDER DEVICE CHAINS KILLS_A_CHAIN`.

This process never starts CUDA, so its forks may: a life begins in the time that CUDA takes, without the imports. The last line is JSON.
"""

import contextlib
import json
import os
import random
import select
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Final

import torch

import tensorstore_ck as tsck

REF: Final = "runs/killed"
SIZES: Final = (1 << 20, 5 << 20, 300_000, 7)
MAX_LIFE_SECONDS: Final = 0.7
"""After the first save of a life is published."""
PATIENCE_SECONDS: Final = 60.0


def state_of(step: int, device: str) -> dict[str, torch.Tensor]:
    """The state at a step: every element follows from it. The last tensor is strided, and half of them change every other step."""
    state = {
        f"t{number}": torch.arange(size, dtype=torch.int32, device=device) * 7 + step // (1 + number % 2)
        for number, size in enumerate(SIZES)
    }
    state["strided"] = torch.arange(1 << 20, dtype=torch.int32, device=device).view(1024, 1024).t() + step
    return state


def advance(state: dict[str, torch.Tensor], step: int) -> None:
    """In place, to `step`."""
    for name, value in state_of(step, str(state["t0"].device)).items():
        state[name].copy_(value)


def live(folder: Path, device: str, published: int, *, is_last: bool) -> None:
    """One life: restores and compares, then saves each step; in turns waited for and in the background."""
    warnings.simplefilter("ignore")
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
        step = 0
        try:
            step = store.resolve(REF).step or 0
        except tsck.errors.NotFoundError:
            state = state_of(step, device)
        else:
            state = store.checkout(REF, device=device)
            for name, expected in state_of(step, device).items():
                if not torch.equal(state[name], expected):
                    raise SystemExit(f"step {step}: {name} differs")
        for turn in range(8 if is_last else 1_000_000):
            step += 1
            advance(state, step)
            if turn % 3 == 0:
                store.put_snapshot(state, ref=REF, step=step)
            else:
                store.put_snapshot_async(state, ref=REF, step=step)
            if turn == 0:
                os.write(published, b"1")


def end_of_life(folder: Path, device: str, delay_seconds: float | None) -> str:
    """Forks a life and kills it `delay_seconds` after its first save (None: waits for its end); returns what is wrong."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            live(folder, device, writer, is_last=delay_seconds is None)
            code = 0
        except SystemExit as exc:
            print(exc, file=sys.stderr, flush=True)
        except BaseException:  # noqa: BLE001 - the child must end here
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    is_there, _, _ = select.select([reader], [], [], PATIENCE_SECONDS)
    has_saved = bool(is_there) and os.read(reader, 1) == b"1"
    os.close(reader)
    if delay_seconds is not None:
        time.sleep(delay_seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not has_saved:
        return f"a life ended with {status} before its first save"
    wanted = 0 if delay_seconds is None else -signal.SIGKILL
    return "" if status == wanted else f"a life ended with {status}, not {wanted}"


def chain(folder: Path, device: str, delays: list[float], wrong: list[str], kills: list[int]) -> None:
    folder.mkdir(parents=True)
    for delay in [*delays, None]:
        found = end_of_life(folder, device, delay)
        if found:
            wrong.append(f"{folder.name}: {found}")
            return
        kills.append(int(delay is not None))


def main() -> None:
    folder, device, chains, kills_a_chain = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    draw = random.Random(5)
    wrong: list[str] = []
    kills: list[int] = []
    threads = [
        threading.Thread(
            target=chain,
            args=(folder / str(number), device, [draw.uniform(0, MAX_LIFE_SECONDS) for _ in range(kills_a_chain)], wrong, kills),
        )
        for number in range(chains)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"kills": sum(kills), "wrong": wrong}))


if __name__ == "__main__":
    main()
