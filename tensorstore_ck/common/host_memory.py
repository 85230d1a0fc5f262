"""How much host memory is free: the default limit of copies of states, whether a restore fits, the error of an allocation that failed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import NoSpaceError

DEFAULT_FRACTION: Final = 0.75
"""Share of the free memory; the rest is left to the training."""

UNCHECKED_BYTES: Final = 256 << 20
"""Smaller allocations are not checked."""
MARGIN: Final = 1.1
"""An allocation that needs more than this many times the free memory, an estimate, is refused."""

_TORCH_TEXTS: Final = ("can't allocate memory", "not enough memory", "out of memory")

_CGROUP: Final = Path("/sys/fs/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")


def default_limit_bytes(local_ranks: int) -> int:
    """The default limit of each of `local_ranks` processes of this host, in bytes."""
    return int(free_bytes() * DEFAULT_FRACTION) // max(local_ranks, 1)


def require_memory(needed_bytes: int, what: str, advice: str) -> None:
    """Refuses to allocate clearly more than is free: the kernel would kill this process or another one.

    Raises:
        NoSpaceError: with both sizes.
    """
    if needed_bytes >= UNCHECKED_BYTES and needed_bytes > MARGIN * (free := free_bytes()):
        raise NoSpaceError(
            f"{what} needs {human_bytes(needed_bytes)} ({needed_bytes:,} bytes) of memory, and this host has {human_bytes(free)} "
            f"({free:,} bytes) free: {advice}",
            object_id="memory",
        )


def memory_error(error: BaseException, what: str) -> BaseException:
    """This package's error for a failed allocation of Python, numpy or torch; any other `error` unchanged."""
    is_torch = isinstance(error, RuntimeError) and any(text in str(error) for text in _TORCH_TEXTS)
    if not is_torch and not isinstance(error, MemoryError):
        return error
    no_space = NoSpaceError(f"{what} ran out of host memory ({str(error) or 'MemoryError'}): free memory on this host", object_id="memory")
    no_space.__cause__ = error
    return no_space


@contextlib.contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Raises a `NoSpaceError` for an allocation that fails inside."""
    try:
        yield
    except (MemoryError, RuntimeError) as exc:
        raise memory_error(exc, what) from exc.__cause__


def free_bytes() -> int:
    """Bytes that can be allocated before the host swaps or the container is killed; the page cache counts as free."""
    try:
        limits = [_field(_MEMINFO, "MemAvailable:") * 1024]
    except OSError:  # not Linux
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]
    for folder, limit, used, stat, cache in _groups():
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or no limit ("max")
            limits.append(_number(folder / limit) - _number(folder / used) + _field(folder / stat, cache))
    return max(0, min(limits))


def _groups() -> Iterator[tuple[Path, str, str, str, str]]:
    """The folders of the process's own group and of all groups above it, each of which may have a limit."""
    v2 = ("memory.max", "memory.current", "memory.stat", "file")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_cache")
    yield _CGROUP, *v2
    yield _CGROUP / "memory", *v1
    with contextlib.suppress(OSError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            top, names = (_CGROUP, v2) if not controllers else (_CGROUP / "memory", v1)
            if not controllers or "memory" in controllers.split(","):
                own = top / path.strip("/")
                yield from ((folder, *names) for folder in (own, *own.parents) if top in folder.parents)


def _number(path: Path) -> int:
    return int(path.read_text())


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, *rest = line.split()
        if key == name:
            return int(rest[0])
    raise ValueError(f"{path} has no {name}")
