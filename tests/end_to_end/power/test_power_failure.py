"""The power fails at any write of the disk: what was acknowledged is there, and what is there is whole.

A loop-mounted ext4 lies in a file that logs writes and flushes. A crash state is everything up to a flush, and of the writes
since then any subset, one of them torn: a disk may reorder and lose what was not flushed. Each is mounted (the journal is
replayed) and opened as after a reboot. A tear is between sectors of 4 KiB, as ext4 itself needs it: half a superblock
cannot be mounted.
"""

import contextlib
import ctypes.util
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tests.effort import PATIENCE_SECONDS, effort
from tests.end_to_end.power.blocklog import Record, read_log

DISK_BYTES = 96 << 20
SECTOR_BYTES = 4096
STATES = effort(40, 480)
STEPS = 6
ROOT = Path(__file__).parents[3]


def missing() -> str:
    """Why the test cannot run here; empty when it can."""
    tools = [tool for tool in ("mkfs.ext4", "losetup", "mount", "umount", "fusermount") if not shutil.which(tool)]
    if os.geteuid() != 0:
        return "needs root"
    if not Path("/dev/fuse").exists() or not Path("/dev/loop-control").exists():
        return "needs /dev/fuse and loop devices"
    if tools or not importlib.util.find_spec("fuse") or not ctypes.util.find_library("fuse"):
        return f"needs {', '.join([*tools, 'fusepy', 'libfuse2'])}"
    return ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.race,
    pytest.mark.timeout(effort(600, 3000)),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]


def run(*command: object) -> str:
    return subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    ).stdout.strip()


@contextlib.contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    """`image` as a mounted ext4, with nothing left behind."""
    folder.mkdir(exist_ok=True)
    device = run("losetup", "-f", "--show", image)
    try:
        run("mount", "-t", "ext4", "-o", "errors=remount-ro", device, folder)
        try:
            yield folder
        finally:
            run("umount", folder)
    finally:
        run("losetup", "-d", device)


@contextlib.contextmanager
def logged_disk(work: Path) -> Iterator[Path]:
    """The folder with ``disk`` and ``mark``."""
    folder = work / "fuse"
    folder.mkdir()
    command = [sys.executable, "-m", "tests.end_to_end.power.blocklog", str(folder), str(work / "log"), str(DISK_BYTES)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (folder / "disk").exists():
                assert process.poll() is None, "the FUSE process ended"
                assert time.monotonic() < deadline
                os.sched_yield()
            yield folder
        finally:
            subprocess.run(["fusermount", "-u", "-z", str(folder)], check=False, timeout=PATIENCE_SECONDS)
            process.kill()


def make_state(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    size = 5 << 18 if step == 3 else 20_000  # one that is written past the page cache too
    return {"frozen": torch.arange(60_000), "weights": torch.randn(size, generator=generator), "step": step}


def holds(state: object, step: int) -> bool:
    expected = make_state(step)
    assert isinstance(state, dict)
    return list(state) == list(expected) and all(
        torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value for name, value in expected.items()
    )


def record_run(work: Path, *, no_sync: bool) -> list[Record]:
    """A job on the logged disk; each acknowledged save is a mark in the log."""
    with logged_disk(work) as folder:
        run("mkfs.ext4", "-q", "-b", SECTOR_BYTES, "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0", folder / "disk")
        with mounted(folder / "disk", work / "mnt") as disk, (folder / "mark").open("wb", buffering=0) as mark:
            run("sync", "-f", disk)
            mark.write(b"start")
            with tsck.open(disk / "store", create=True, no_sync=no_sync, cache_dir=work / "cache") as store:
                for step in range(1, STEPS + 1):
                    store.put_snapshot(make_state(step), ref="job", step=step)
                    mark.write(b"put %d" % step)
                    if step == 2:
                        store.tag("kept", "job")
                        mark.write(b"tag")
    return read_log(work / "log")


class Loss(AssertionError):
    """Something that was acknowledged is not there."""


def check_state(image: Path, work: Path, acknowledged: set[str], number: int) -> None:
    """Opens the store of one crash state as the host does after its reboot."""
    with mounted(image, work / "after") as disk:
        try:
            store = tsck.open(disk / "store", cache_dir=work / f"cache-{number}")
        except tsck.StoreError as exc:
            if acknowledged - {"start"}:
                raise Loss(f"no store, but {sorted(acknowledged)}: {exc}") from exc
            return
        with store:
            present = {int(snapshot.step or 0) for snapshot in store.log("job")} if "job" in store.branches() else set()
            lost = {name for name in acknowledged if name.startswith("put") and int(name[4:]) not in present}
            if lost or ("tag" in acknowledged and "kept" not in store.tags()):
                raise Loss(f"lost {sorted(lost)} of {sorted(acknowledged)}")
            for step in present:
                if not holds(store.checkout(f"job@{step}"), step):
                    raise Loss(f"step {step} came back different")
            report = store.fsck(read_data=True)
            assert report.ok, report.findings
            store.put_snapshot(make_state(99), ref="job", step=99, expect=tsck.ANY)
            assert holds(store.checkout("job"), 99)


def crash_states(log: list[Record], states: int, seed: int) -> Iterator[tuple[bytearray, set[str]]]:
    """Images of the disk at sampled moments, and what had been acknowledged by then."""
    chance = random.Random(seed)
    start = next(number for number, record in enumerate(log) if record == Record(b"M", 0, b"start"))
    moments = sorted(chance.sample(range(start + 1, len(log) + 1), min(states, len(log) - start)))
    durable = bytearray(DISK_BYTES)
    pending: list[Record] = []
    acknowledged: set[str] = set()
    done = 0
    for moment in moments:
        for record in log[done:moment]:
            if record.kind == b"M":
                acknowledged.add(record.data.decode())
            elif record.kind == b"W":
                pending.append(record)
            else:
                for _, offset, data in pending:
                    durable[offset : offset + len(data)] = data
                pending.clear()
        done = moment
        image = bytearray(durable)
        kept = [record for record in pending if chance.random() < 0.5]
        for number, (_, offset, data) in enumerate(kept):
            whole = len(data) if number + 1 < len(kept) else chance.randrange(0, len(data) + 1, SECTOR_BYTES)
            image[offset : offset + whole] = data[:whole]
        yield image, set(acknowledged)


def losses(work: Path, *, no_sync: bool, states: int) -> int:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    log = record_run(work, no_sync=no_sync)
    assert sum(record.kind == b"F" for record in log) > (0 if no_sync else 5 * STEPS)
    count = 0
    for number, (image, acknowledged) in enumerate(crash_states(log, states, seed)):
        (work / "image").write_bytes(image)
        try:
            check_state(work / "image", work, acknowledged, number)
        except (Loss, AssertionError, tsck.StoreError, Warning) as exc:  # the store's warnings are errors here
            count += 1
            print(f"state {number}: {exc}")
    return count


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    folder = Path("/dev/shm") / f"tsck-power-{os.getpid()}" if Path("/dev/shm").is_dir() else tmp_path
    folder.mkdir(exist_ok=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_what_was_acknowledged_survives(work: Path) -> None:
    assert losses(work, no_sync=False, states=STATES) == 0


def test_without_fsync_it_does_not(work: Path) -> None:
    """That the test can fail."""
    assert losses(work, no_sync=True, states=20) > 0
