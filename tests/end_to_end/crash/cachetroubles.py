"""What happens to the cache of a host while a job saves: real disks, files and processes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.effort import PATIENCE_SECONDS

_HOLDER = """
import sys
from pathlib import Path
from tensorstore_ck.log.cache.batch_lock import BatchLock
with BatchLock(Path(sys.argv[1]), 1.0).held(wait=True):
    print("held", flush=True)
    sys.stdin.read()
"""


def cache_files(cache: Path, name: str) -> list[Path]:
    return list(cache.glob(f"*/{name}"))


@contextmanager
def none(_cache: Path) -> Iterator[None]:
    yield


@contextmanager
def stopped_sibling(cache: Path) -> Iterator[None]:
    """Another process of the host stands still in a batch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    (lock,) = cache_files(cache, "batch.lock")
    command = [sys.executable, "-c", _HOLDER, str(lock)]
    holder = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        holder.send_signal(signal.SIGCONT)
        holder.communicate(timeout=PATIENCE_SECONDS)


@contextmanager
def deleted(cache: Path) -> Iterator[None]:
    shutil.rmtree(cache)
    yield


def _overwritten(make: Callable[[Path], bytes]) -> Callable[[Path], AbstractContextManager[None]]:
    @contextmanager
    def trouble(cache: Path) -> Iterator[None]:
        for data in cache_files(cache, "data.mdb"):
            data.write_bytes(make(data))
        yield

    return trouble


def _of_another_version(data: Path) -> bytes:
    """LMDB's version number in both meta pages (16 bytes of page header, magic, version)."""
    changed = bytearray(data.read_bytes())
    for at in (0, 4096):
        changed[at + 20] ^= 0x70
    return bytes(changed)


TROUBLES: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "none": none,
    "a sibling is stopped": stopped_sibling,
    "deleted": deleted,
    "garbage": _overwritten(lambda _: os.urandom(200_000)),
    "cut short": _overwritten(lambda data: data.read_bytes()[:5000]),
    "empty": _overwritten(lambda _: b""),
    "of another version": _overwritten(_of_another_version),
}
"""What happens once a job has begun, and for as long as the context lasts. The disk's troubles: `mounted`."""


@contextmanager
def mounted(folder: Path, size_bytes: int) -> Iterator[Callable[[str], None]]:
    """A filesystem of its own at `folder`; yields what fills it up, or makes it read-only.

    Raises:
        OSError: this user may not mount one.
    """
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], capture_output=True, check=False
    ).returncode:
        raise OSError("cannot mount a tmpfs here")

    def change(trouble: str) -> None:
        if trouble == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        else:
            with contextlib.suppress(OSError), open(folder / "ballast", "wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(4096))

    try:
        yield change
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
