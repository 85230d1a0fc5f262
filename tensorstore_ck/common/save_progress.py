"""Measures the time and the bytes of one save: `SaveMeter`, to which its threads add, and `Progress`, a snapshot of it for callers.

Knows the names of the stages and a clock. A stage's seconds are those in which at least one thread worked on it, so that no stage takes
longer than the save; stages overlap, so their seconds do not add up.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, get_args

Stage = Literal["capture", "hash", "encode", "write", "upload", "commit"]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
"""In order of their beginning."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a save is."""

    stage: Stage | Literal["queued"]
    """The last stage that has begun; ``queued`` before the capture, and between it and the next stage."""
    done_bytes: int
    """Like the next two fields: of the last stage that has begun and whose bytes are known in advance."""
    total_bytes: int
    """0 if unknown."""
    bytes_per_second: float
    """Since that stage began."""
    stage_seconds: Mapping[Stage, float]
    """Of every stage, so far."""
    stage_bytes: Mapping[Stage, int]

    @property
    def fraction(self) -> float:
        """0.0 to 1.0: `done_bytes` of `total_bytes`."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 0.0

    def seconds_fields(self) -> dict[str, float]:
        """``capture_seconds``, ``hash_seconds`` and so on: fields of events."""
        return {f"{stage}_seconds": seconds for stage, seconds in self.stage_seconds.items()}


@dataclass(slots=True)
class _StageTotals:
    """One stage."""

    begun_at: float | None = None
    threads: int = 0
    """Threads that work on it now."""
    busy_since: float = 0.0
    """Valid if `threads` is not 0."""
    seconds: float = 0.0
    """Busy seconds until `busy_since`."""
    thread_seconds: float = 0.0
    """Summed over all threads that have left the stage."""
    done_bytes: int = 0
    total_bytes: int = 0


class SaveMeter:
    """Seconds and bytes of the stages of one save. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, check: Callable[[], object] = lambda: None) -> None:
        """`check` is called before each stage; an exception from it ends the save."""
        self._clock = clock
        self._check = check
        self._lock = threading.Lock()
        self._tallies: dict[Stage, _StageTotals] = {stage: _StageTotals() for stage in STAGES}

    def expect(self, stage: Stage, total_bytes: int) -> None:
        """Sets the total bytes of a stage."""
        with self._lock:
            self._tallies[stage].total_bytes = total_bytes

    def count(self, stage: Stage, done_bytes: int) -> None:
        """Adds bytes that a stage has processed; negative ones must be processed again."""
        with self._lock:
            self._tallies[stage].done_bytes += done_bytes

    @contextmanager
    def timed(self, stage: Stage, done_bytes: int = 0) -> Iterator[None]:
        """Counts a thread as working on `stage` while it is inside; adds `done_bytes` unless it fails."""
        self._check()
        tally, processed = self._tallies[stage], 0
        with self._lock:
            entered_at = self._clock()
            if not tally.threads:
                tally.busy_since = entered_at
                tally.begun_at = tally.busy_since if tally.begun_at is None else tally.begun_at
            tally.threads += 1
        try:
            yield
            processed = done_bytes
        finally:
            with self._lock:
                tally.done_bytes += processed
                tally.threads -= 1
                left_at = self._clock()
                tally.thread_seconds += left_at - entered_at
                if not tally.threads:
                    tally.seconds += left_at - tally.busy_since

    def seconds_per_byte(self, stage: Stage, cores: int) -> float:
        """The cost of a byte at a stage, in seconds of a core: waiting threads count for no more than the cores that there are."""
        with self._lock:
            tally = self._tallies[stage]
            return min(tally.thread_seconds, cores * tally.seconds) / max(1, tally.done_bytes)

    def seconds(self, stage: Stage) -> float:
        """How long threads worked on a stage that has ended."""
        with self._lock:
            return self._tallies[stage].seconds

    def snapshot(self) -> Progress:
        """The progress of all threads at one moment."""
        with self._lock:
            return self._snapshot_at(self._clock())

    def _snapshot_at(self, now: float) -> Progress:
        """Under the lock. A function of its own: see common/waiting.py."""
        begun, shown = list[Stage](), None
        seconds, sizes_bytes = dict[Stage, float](), dict[Stage, int]()
        for stage, tally in self._tallies.items():
            seconds[stage] = tally.seconds + (now - tally.busy_since if tally.threads else 0.0)
            sizes_bytes[stage] = tally.done_bytes
            if tally.begun_at is not None:
                begun.append(stage)
                shown = tally if tally.total_bytes else shown
        queued = begun in ([], ["capture"]) and not self._tallies["capture"].threads
        done, total, rate = 0, 0, 0.0
        if shown is not None and shown.begun_at is not None:
            done, total = min(shown.done_bytes, shown.total_bytes), shown.total_bytes
            rate = done / (now - shown.begun_at) if now > shown.begun_at else 0.0
        return Progress(
            stage="queued" if queued else begun[-1],
            done_bytes=done,
            total_bytes=total,
            bytes_per_second=rate,
            stage_seconds=seconds,
            stage_bytes=sizes_bytes,
        )
