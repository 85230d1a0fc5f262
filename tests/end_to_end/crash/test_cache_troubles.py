"""Many saves of a job whose host's cache breaks: all are published, and at most one warning says what was seen."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.log.cache import CacheWarning
from tests.effort import PATIENCE_SECONDS
from tests.small_disk import small_disk

SAVES = 24

_HOLDER = """
import sys
from pathlib import Path
from tensorstore_ck.log.cache.lmdb_environment import BatchLock
with BatchLock(Path(sys.argv[1]), 1.0).held(wait=True):
    print("held", flush=True)
    sys.stdin.read()
"""


def cache_files(cache: Path, name: str) -> list[Path]:
    return list(cache.glob(f"*/{name}"))


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


@contextmanager
def of_another_version(cache: Path) -> Iterator[None]:
    """LMDB's version number in both meta pages (16 bytes of page header, magic, version)."""
    for data in cache_files(cache, "data.mdb"):
        changed = bytearray(data.read_bytes())
        for at in (0, 4096):
            changed[at + 20] ^= 0x70
        data.write_bytes(changed)
    yield


TROUBLES: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "a sibling is stopped": stopped_sibling,
    "deleted": deleted,
    "of another version": of_another_version,
}
"""What happens once a job has begun, and for as long as the context lasts. Other damage: tests/log/cache/test_lmdb.py."""


@contextmanager
def mounted(folder: Path, size_bytes: int) -> Iterator[Callable[[str], None]]:
    """A filesystem of its own at `folder`; yields what fills it up, or makes it read-only.

    Raises:
        OSError: this user may not mount one.
    """

    def change(trouble: str) -> None:
        if trouble == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        else:
            with contextlib.suppress(OSError), open(folder / "ballast", "wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(4096))

    with small_disk(folder, str(size_bytes)):
        yield change


def state(step: int) -> dict[str, object]:
    return {"weights": torch.full((300,), float(step)), "step": step}


def save(store: tsck.Store, steps: range) -> None:
    for step in steps:
        saved = store.put_snapshot(state(step), ref="job", step=step) if step % 2 else _later(store, step)
        assert saved.step == step


def _later(store: tsck.Store, step: int) -> tsck.Snapshot:
    return store.put_snapshot_async(state(step), ref="job", step=step).wait()


def check(folder: Path, caught: list[warnings.WarningMessage], *, may_warn: int) -> None:
    assert {each.category for each in caught} <= {CacheWarning}, [str(each.message) for each in caught]
    assert len(caught) <= may_warn
    with tsck.open(folder / "store", cache_dir=folder / "another cache") as store:
        assert [each.step for each in store.log("job")] == list(range(SAVES, 0, -1))
        assert store.checkout("job")["step"] == SAVES
        assert store.fsck(read_data=True).ok


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@pytest.mark.slow
@pytest.mark.parametrize(("name", "begins"), [*zip(TROUBLES, (10, 1, 10), strict=True)])
def test_while_it_saves(tmp_path: Path, caught: list[warnings.WarningMessage], name: str, begins: int) -> None:
    cache = tmp_path / "cache"
    with tsck.open(tmp_path / "store", create=True, no_sync=True, cache_dir=cache) as store:
        save(store, range(1, begins + 1))
        with TROUBLES[name](cache):
            save(store, range(begins + 1, SAVES - 5))
        save(store, range(SAVES - 5, SAVES + 1))
    check(tmp_path, caught, may_warn=1)


@pytest.mark.parametrize("name", TROUBLES)
def test_when_it_is_opened(tmp_path: Path, caught: list[warnings.WarningMessage], name: str) -> None:
    cache = tmp_path / "cache"
    with tsck.open(tmp_path / "store", create=True, no_sync=True, cache_dir=cache) as store:
        save(store, range(1, 10))
    with TROUBLES[name](cache), tsck.open(tmp_path / "store", no_sync=True, cache_dir=cache) as store:
        assert store.checkout("job")["step"] == 9
        save(store, range(10, SAVES + 1))
    check(tmp_path, caught, may_warn=1)


@pytest.mark.parametrize(("name", "begins"), [("full", 0), ("full", 10), ("read-only", 0), ("read-only", 10)])
def test_a_disk_of_its_own(tmp_path: Path, caught: list[warnings.WarningMessage], name: str, begins: int) -> None:
    try:
        with mounted(tmp_path / "cache", 1 << 20) as change:
            cache = tmp_path / "cache"
            if begins == 0:
                change(name)
            with tsck.open(tmp_path / "store", create=True, no_sync=True, cache_dir=cache) as store:
                save(store, range(1, begins + 1))
                if begins:
                    change(name)
                save(store, range(begins + 1, SAVES + 1))
    except OSError as exc:
        if "cannot mount" not in str(exc):
            raise
        pytest.skip(str(exc))
    check(tmp_path, caught, may_warn=1)
