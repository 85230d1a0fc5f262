"""What the machine did meanwhile: how much of it others used, since a bench on a busy machine measures its neighbours; and what memory
a family of processes holds.

Linux only. Ours are this process and its descendants; the kernel's own threads count as others, so a bench that writes much to a
disk sees a little of itself.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Others:
    """What everybody else used."""

    cores: float = 0.0
    """On average, once the measurement has ended."""

    def __str__(self) -> str:
        busy = f"others used {self.cores:.2f} of {os.cpu_count()} cores meanwhile"
        return busy if self.cores < 0.1 else f"{busy}: PROVISIONAL, the machine was not quiet"


@contextmanager
def watch_others() -> Iterator[Others]:
    """Measures from its beginning to its end."""
    others = Others()
    began, all_before, ours_before = time.monotonic(), _all_seconds(), _our_seconds()
    yield others
    seconds = time.monotonic() - began
    others.cores = max(0.0, (_all_seconds() - all_before) - (_our_seconds() - ours_before)) / seconds


def family(root: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def pss_bytes(root: int) -> int:
    """What a process and its descendants hold, memory that they share counted once. Takes the kernel some 15 ms a GiB."""
    total = 0
    for pid in family(root):
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _all_seconds() -> float:
    """That the cores were not idle, since the machine began; what the hypervisor took from them counts."""
    _, user, nice, system, _, _, interrupts, soft, stolen, *_ = Path("/proc/stat").read_text().splitlines()[0].split()
    return sum(map(int, (user, nice, system, interrupts, soft, stolen))) / _TICKS


def _our_seconds() -> float:
    """Of processes that live, and of those that were waited for."""
    ticks = 0
    for pid in family(os.getpid()):
        if (fields := _stat(pid)) is not None:
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def _stat(pid: int) -> list[str] | None:
    """What follows the name in /proc/PID/stat; None: it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
