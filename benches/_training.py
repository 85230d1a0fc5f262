"""One training process of the bench `loop`: it trains with and without saves, in turns, and reports what each cost.

A step is real work on one core: an optimizer that changes all of the state, then products of small matrices, as many as make the step
last as long as it should on a quiet machine. Ten steps with a save before the first and ten without take turns, within this process and
in an order that changes: what makes one process slower than the next hits both.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benches._savers import DcpSaver, Saver, TorchSaver, TsckSaver
from benches._usage import pss_bytes
from benches._warmcopy import State, WarmCopy
from benches.local import make_state
from benches.memory import high_water_bytes, reset_high_water
from tensorstore_ck.common.threads import cpu_threads

STEPS = 10
"""From one save to the next."""
MATRIX = 512
TSCK = "tsck put_snapshot_async"

_THREAD, _PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
SAVERS: dict[str, Callable[[Path, float, int], Saver]] = {
    TSCK: TsckSaver,
    "torch.save of a clone, in a thread": lambda folder, rate, size: TorchSaver(folder, rate),
    "dcp.async_save, thread": lambda folder, rate, size: DcpSaver(folder, rate, _THREAD, kept=False),
    "dcp.async_save, thread, stager kept": lambda folder, rate, size: DcpSaver(folder, rate, _THREAD, kept=True),
    "dcp.async_save, process": lambda folder, rate, size: DcpSaver(folder, rate, _PROCESS, kept=False),
    "dcp.async_save, process, stager kept": lambda folder, rate, size: DcpSaver(folder, rate, _PROCESS, kept=True),
}


class Job(NamedTuple):
    """What one process does."""

    saver: str
    folder: Path
    size_bytes: int
    rate: float
    """Bytes a second that the store takes."""
    step_seconds: float
    pairs: int
    """Of ten steps with a save and ten without."""
    copies: int = 5
    """How often a warm copy is timed."""


class Trained(NamedTuple):
    """What it saw."""

    plain_seconds: list[float]
    """Of ten steps without a save."""
    saving_seconds: list[float]
    """Of ten steps with one, and of waiting for it in the end if it took longer."""
    stall_seconds: list[float]
    """Of the call that saves."""
    store_seconds: list[float]
    """From the call to its being durable."""
    copy_seconds: float
    """Of one warm copy of the state."""
    extra_bytes: int
    """The kernel's high-water mark of this process, beyond what it held before the first save."""
    before_pss_bytes: int
    """Its proportional share of memory then."""


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Trainer:
    """Its steps."""

    def __init__(self, state: State, step_seconds: float) -> None:
        torch.set_num_threads(1)
        self._state = state
        self._a, self._b, self._c = (torch.rand(MATRIX, MATRIX) for _ in range(3))
        self._products = 20
        optimizer = min(timed(self._optimize) for _ in range(3))
        product = min(timed(self._multiply) for _ in range(10)) / self._products
        self._products = max(1, round((step_seconds - optimizer) / product))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._optimize()
            self._multiply()

    def _optimize(self) -> None:
        for tensor in self._state.values():
            tensor.add_(1e-3)

    def _multiply(self) -> None:
        for _ in range(self._products):
            torch.mm(self._a, self._b, out=self._c)


class Loop:
    """Ten steps at a time."""

    def __init__(self, trainer: Trainer, saver: Saver, state: State) -> None:
        self._trainer = trainer
        self._saver = saver
        self._state = state
        self._step = 0
        self.stalls: list[float] = []
        self.stored: list[float] = []

    def plain(self) -> float:
        return timed(lambda: self._trainer.run(STEPS))

    def saving(self) -> float:
        self._step += STEPS
        began = time.perf_counter()
        self._saver.save(self._state, self._step)
        self.stalls.append(time.perf_counter() - began)
        watcher = threading.Thread(target=self._watch, args=(began,))
        watcher.start()
        self._trainer.run(STEPS)
        watcher.join()
        self._saver.wait()  # raises what failed
        return time.perf_counter() - began

    def _watch(self, began: float) -> None:
        self._saver.wait()
        self.stored.append(time.perf_counter() - began)


def train(job: Job) -> Trained:
    state = make_state(64, job.size_bytes // 64)
    trainer = Trainer(state, job.step_seconds)
    reset_high_water()
    before, before_pss = high_water_bytes(), pss_bytes(os.getpid())
    saver = SAVERS[job.saver](job.folder, job.rate, job.size_bytes)
    loop = Loop(trainer, saver, state)
    loop.saving()
    loop.stalls.clear()
    loop.stored.clear()
    plain, saving = [], []
    for number in range(job.pairs):
        if number % 2:
            saving.append(loop.saving())
        plain.append(loop.plain())
        if not number % 2:
            saving.append(loop.saving())
    extra = high_water_bytes() - before
    saver.close()
    return Trained(plain, saving, loop.stalls, loop.stored, time_copy(state, job.copies), extra, before_pss)


def time_copy(state: State, times: int) -> float:
    if not times:
        return 0.0
    copy = WarmCopy(state, cpu_threads())
    return statistics.median(timed(copy.by_memmove) for _ in range(times))


def flood(job: Job, on_full: str) -> int:
    """A save at every step, far more than the store takes, with a budget of one copy: how far memory went beyond state and budget."""
    state = make_state(64, job.size_bytes // 64)
    trainer = Trainer(state, job.step_seconds)
    reset_high_water()
    before = high_water_bytes()
    saver = TsckSaver(job.folder, job.rate, job.size_bytes, on_full)
    for step in range(STEPS):
        trainer.run(1)
        saver.save(state, step)
    saver.close()
    return high_water_bytes() - before - job.size_bytes
