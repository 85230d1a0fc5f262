"""How much host memory captures may take where nobody says: what the container and the host have left, shared by the host's ranks."""

import contextlib
import os
from pathlib import Path
from typing import Final

SHARE: Final = 0.75
"""Of what is free: the rest is left to what the training still allocates."""

_CGROUP: Final = Path("/sys/fs/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")


def default_limit_bytes(local_ranks: int, *, cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """The budget of one of `local_ranks` processes of this host, in bytes."""
    return int(free_bytes(cgroup=cgroup, meminfo=meminfo) * SHARE) // max(local_ranks, 1)


def free_bytes(*, cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Bytes that can be allocated before the host swaps or the container is killed; what the page cache holds counts as free."""
    found = [_available(meminfo)]
    for limit, used, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache"),
    ):
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or no limit ("max")
            found.append(_number(cgroup / limit) - _number(cgroup / used) + _field(cgroup / stat, cache))
    return max(0, min(found))


def _available(meminfo: Path) -> int:
    try:
        return _field(meminfo, "MemAvailable:") * 1024
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _number(path: Path) -> int:
    return int(path.read_text())


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, *rest = line.split()
        if key == name:
            return int(rest[0])
    raise ValueError(f"{path} has no {name}")
