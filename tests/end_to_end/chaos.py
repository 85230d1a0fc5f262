"""Random faults over a staging disk that two processes share, and what became of each acknowledged save.

    python -m tests.end_to_end.chaos --minutes 60 --seed 1 [--folder /dev/shm/chaos]

Two writers of one host save to branches of their own. Meanwhile they are killed, stopped for a while and interrupted; calls of the system
fail; bits flip in staged files. Each writer notes, durably, what was acknowledged. At the end everything is published, and compared with
the notes. A save that a flipped bit damaged may be lost, if an error or a warning names it. Prints JSON; exits with 1
if something is wrong.
"""

import argparse
import contextlib
import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

import tensorstore_ck as tsck

WRITERS: Final = 2
HANG_SECONDS: Final = 120.0
"""Without a note of a writer that is not stopped."""
FAULTY_SECONDS: Final = (2.0, 6.0)
WRITES: Final = ("pwrite", "pwritev", "write", "fsync", "fdatasync", "link", "rename", "replace", "mkdir")
READS: Final = ("open", "unlink", "pread", "preadv", "stat")
FAULT_SHARE: Final = 0.004
NAMES_NO_CAUSE: Final = ("moved it (by this very pid", "does not exist", "salvage")
"""Texts of refusals that are wrong here: one writer a branch, and a sound store."""


def state_of(writer: int, step: int) -> dict[str, Any]:
    """Deterministic; a third of it is new at each step, and a third changes never."""

    def numbers(*key: int) -> torch.Tensor:
        return torch.randint(0, 1 << 30, (60_000,), generator=torch.Generator().manual_seed(hash(key) % (1 << 40)))

    return {"new": numbers(writer, step), "slow": numbers(writer, step // 5 + 1, 7), "never": numbers(writer, 3, 3, 3), "step": step}


def is_state(found: dict[str, Any], writer: int, step: int) -> bool:
    """Whether a restored state is that of the step."""
    expected = state_of(writer, step)
    return found["step"] == step and all(torch.equal(found[name], expected[name]) for name in ("new", "slow", "never"))


class Notes:
    """Lines of JSON that survive a kill."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, **note: Any) -> None:
        """One system call: a line is there whole or not at all."""
        _write(self._file, json.dumps({"at": round(time.time(), 2), "pid": os.getpid(), **note}).encode() + b"\n")


_write = os.write


def read_notes(folder: Path) -> list[dict[str, Any]]:
    """The notes of all writers and of the end."""
    return [json.loads(line) for path in sorted(folder.glob("notes-*")) for line in path.read_bytes().splitlines()]


def break_calls(folder: Path, seed: int) -> None:
    """Lets calls of `os` below `folder` fail at random while the file `faults` is there."""
    chance, switch = random.Random(seed), str(folder / "faults")
    is_there = os.path.exists
    inside = (str(folder / "store"), str(folder / "staging"))

    def below(at: Any) -> bool:
        if isinstance(at, int):
            try:
                at = os.readlink(f"/proc/self/fd/{at}")
            except OSError:
                return False
        return str(at).startswith(inside)

    def broken(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if chance.random() < FAULT_SHARE and is_there(switch) and args and below(args[0]):
                number = chance.choice((errno.EIO, errno.ESTALE, *([errno.ENOSPC] if real.__name__ in WRITES else [])))
                raise OSError(number, os.strerror(number))
            return real(*args, **options)

        return call

    for name in (*WRITES, *READS):
        setattr(os, name, broken(getattr(os, name)))


def write(folder: Path, writer: int, life: int, seed: int) -> None:
    """One life of a writer."""
    notes, chance, ref = Notes(folder / f"notes-{writer}"), random.Random(seed), f"runs/{writer}"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes without
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_, **__: notes.add(said=str(message))
    logging.getLogger("tensorstore_ck").addHandler(Lines(notes))
    break_calls(folder, seed)
    waiting: list[tuple[int, tsck.PendingSnapshot]] = []
    while True:
        try:
            with opened(folder) as store:
                step = resume(store, ref, writer, notes)
                while True:
                    step += 1
                    notes.add(begins=step)
                    if chance.random() < 0.25:
                        store.put_snapshot(state_of(writer, step), ref=ref, step=step)
                        notes.add(published=step, ref=ref)
                        continue
                    pending = store.put_snapshot_async(state_of(writer, step), ref=ref, step=step)
                    pending.staged.wait(HANG_SECONDS)
                    notes.add(staged=step, ref=ref)
                    waiting.append((step, pending))
                    if chance.random() < 0.5:
                        for done, each in waiting:
                            each.wait(HANG_SECONDS)
                            notes.add(published=done, ref=ref)
                        waiting.clear()
        except KeyboardInterrupt:
            notes.add(interrupted=True)
        except tsck.StoreError as exc:
            notes.add(error=type(exc).__name__, text=str(exc))
        except Exception:  # noqa: BLE001 - a raw error is a finding
            notes.add(raw=traceback.format_exc())
        waiting.clear()
        time.sleep(0.02)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[tsck.Store]:
    """The store, with the staging disk of both writers."""
    store = tsck.open(folder / "store", create=True, staging=folder / "staging", cache_dir=folder / "cache", state_dir=folder / "state")
    try:
        yield store
    finally:
        store.close()


def resume(store: tsck.Store, ref: str, writer: int, notes: Notes) -> int:
    """The step to go on from, whose state is compared."""
    try:
        found = store.checkout(ref)
    except tsck.NotFoundError:
        return 0
    step = found["step"]
    notes.add(resumed=step, equal=is_state(found, writer, step))
    return int(step)


class Lines(logging.Handler):
    """Notes of what the package logs."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.add(said=record.getMessage())


class Overseer:
    """Starts the writers, and does them harm."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._chance = folder, random.Random(seed)
        self._writers: dict[int, subprocess.Popen[bytes]] = {}
        self._lives: Counter[int] = Counter()
        self.did: Counter[str] = Counter()
        self.hangs: list[str] = []

    def run(self, seconds: float) -> None:
        """For so long from the first saves on; then all writers are killed."""
        for writer in range(WRITERS):
            self._start(writer)
        while not all(self._has_saved(writer) for writer in range(WRITERS)):
            time.sleep(0.05)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for writer in range(WRITERS):
                if self._writers[writer].poll() is not None:
                    self._start(writer)
            time.sleep(self._chance.uniform(0.05, 1.5))
            self._harm()
            self._look_for_hangs()
        (self._folder / "faults").unlink(missing_ok=True)
        for process in self._writers.values():
            process.kill()
            process.wait()

    def _has_saved(self, writer: int) -> bool:
        path = self._folder / f"notes-{writer}"
        return path.exists() and b'"published"' in path.read_bytes()

    def _start(self, writer: int) -> None:
        self._lives[writer] += 1
        life = self._lives[writer]
        command = [
            sys.executable,
            "-m",
            "tests.end_to_end.chaos",
            "--writer",
            str(writer),
            "--life",
            str(life),
            "--folder",
            str(self._folder),
        ]
        errors = (self._folder / f"errors-{writer}").open("ab")
        self._writers[writer] = subprocess.Popen([*command, "--seed", str(self._chance.randrange(1 << 30))], stderr=errors)

    def _harm(self) -> None:
        writer = self._chance.randrange(WRITERS)
        process = self._writers[writer]
        harm = self._chance.choices(["kill", "stop", "interrupt", "faults", "flip", "kill both", "nothing"], [3, 3, 4, 2, 2, 1, 3])[0]
        self.did[harm] += 1
        if harm == "kill":
            process.kill()
            process.wait()
        elif harm == "kill both":
            for each in self._writers.values():
                each.kill()
                each.wait()
        elif harm == "interrupt":
            process.send_signal(signal.SIGINT)
        elif harm == "stop":
            process.send_signal(signal.SIGSTOP)
            if self._chance.random() < 0.4:
                self._flip()
            time.sleep(self._chance.uniform(0.2, 4.0))
            if self._chance.random() < 0.3:
                self.did["killed while stopped"] += 1
                process.kill()
                process.wait()
            else:
                process.send_signal(signal.SIGCONT)
        elif harm == "faults":
            (self._folder / "faults").touch()
            time.sleep(self._chance.uniform(*FAULTY_SECONDS))
            (self._folder / "faults").unlink(missing_ok=True)
        elif harm == "flip":
            self._flip()

    def _flip(self) -> None:
        files = [path for path in (self._folder / "staging").glob("*/unsent/**/*") if path.is_file()]
        with contextlib.suppress(OSError, ValueError, IndexError):
            path = self._chance.choice(files)
            with path.open("r+b") as file:
                at = self._chance.randrange(path.stat().st_size)
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << self._chance.randrange(8)]))
            Notes(self._folder / "notes-overseer").add(flipped=str(path.relative_to(self._folder)))
            self.did["bits flipped"] += 1

    def _look_for_hangs(self) -> None:
        for writer in range(WRITERS):
            path = self._folder / f"notes-{writer}"
            if path.exists() and time.time() - path.stat().st_mtime > HANG_SECONDS:
                process = self._writers[writer]
                process.send_signal(signal.SIGABRT)  # faulthandler prints where each thread is
                process.wait()
                self.hangs.append(f"writer {writer}, life {self._lives[writer]}")
                path.touch()


def judge(folder: Path) -> dict[str, Any]:
    """Publishes what is left, and compares the store with the notes."""
    end = Notes(folder / "notes-end")
    warnings.showwarning = lambda message, *_, **__: end.add(said=str(message))
    logging.getLogger("tensorstore_ck").addHandler(Lines(end))
    left = []
    for _ in range(20):
        try:
            with opened(folder) as store:
                for writer in range(WRITERS):
                    with contextlib.suppress(tsck.NotFoundError):
                        store.finish_staged(f"runs/{writer}")
            break
        except tsck.StoreError as exc:
            end.add(error=type(exc).__name__, text=str(exc))
            left.append(str(exc))
    notes = read_notes(folder)
    said = "\n".join(note.get("said", "") + note.get("text", "") for note in notes)
    found: dict[str, Any] = {
        "acknowledged": 0,
        "lost": [],
        "lost by name": [],
        "unreadable": [],
        "left on the staging disk": len(left) == 20,
    }
    with tsck.open(folder / "store", cache_dir=folder / "fresh-cache", state_dir=folder / "fresh-state") as store:
        for writer in range(WRITERS):
            ref = f"runs/{writer}"
            stored = {}
            for snapshot in store.log(ref):
                stored[snapshot.step] = snapshot
                try:
                    if not is_state(store.checkout(snapshot.root), writer, snapshot.step or 0):
                        found["unreadable"].append(f"{ref}@{snapshot.step}: another state")
                except tsck.StoreError as exc:
                    found["unreadable"].append(f"{ref}@{snapshot.step}: {exc}")
            for kind in ("published", "staged"):
                steps = {note[kind] for note in notes if note.get("ref") == ref and kind in note}
                found["acknowledged"] += len(steps)
                for step in sorted(steps - stored.keys()):
                    is_named = kind == "staged" and f"{ref}@{step}" in said
                    found["lost by name" if is_named else "lost"].append(f"{ref}@{step} ({kind})")
        report = store.fsck(read_data=True)
        found["fsck"] = [str(finding) for finding in report.findings if finding.severity != "notice"]
    found["resumed wrongly"] = [note for note in notes if note.get("equal") is False]
    found["raw errors"] = [note["raw"][-1500:] for note in notes if "raw" in note][:5]
    found["errors"] = Counter(note["error"] for note in notes if "error" in note)
    found["conflicts"] = [note["text"] for note in notes if note.get("error") == "ConflictError"][:5]
    found["no cause"] = [note["text"] for note in notes if any(text in note.get("text", "") for text in NAMES_NO_CAUSE)][:5]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/chaos"))
    parser.add_argument("--writer", type=int)
    parser.add_argument("--life", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.writer is not None:
        import faulthandler

        faulthandler.enable()
        write(args.folder, args.writer, args.life, args.seed)
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    opened(args.folder).__enter__().close()
    overseer = Overseer(args.folder, args.seed)
    overseer.run(60 * args.minutes)
    found = {"did": overseer.did, "hangs": overseer.hangs, **judge(args.folder)}
    print(json.dumps(found, indent=1))
    wrong = ("hangs", "lost", "unreadable", "resumed wrongly", "raw errors", "no cause", "fsck", "left on the staging disk")
    sys.exit(any(found[name] for name in wrong))


if __name__ == "__main__":
    main()
