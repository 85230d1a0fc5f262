"""What the processes of test_processes do: writers, gcs and readers, which go on until they are killed.

They say what the store must keep in files, a line each, in one write, which SIGKILL cannot tear: ``held`` after a save or an undo returned,
``forgets`` before a forget begins.
"""

import json
import os
import random
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from blake3 import blake3

import tensorstore_ck as tsck
from tensorstore_ck.gc import GcOptions

WRITERS: Final = 4
KEPT: Final = 3
SHARED: Final = "shared"
LAG: Final = 2 * (KEPT + 1)
"""How long ago, by turns of two branches, the save before the last one forgot its snapshots: their blocks are dying."""
POOL: Final = 40
"""Tensors that any writer takes now and then: some are held by another one, some are dying."""
TENSOR_ELEMENTS: Final = 30_000
GAVE_UP: Final = 3
"""Exit code of a process whose backend did not answer: as good as killed."""

State = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What a process does, and where."""

    role: str
    number: int
    url: str
    storage_options: dict[str, Any]
    cache: str
    folder: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.role}-{self.number}"


# --- what is saved --------------------------------------------------------------------------------------------------------


def make_state(step: int) -> State:
    """The state of a step, which has its writer in it: some tensors that all share, some that come and go, and one of its own."""
    number, writer = divmod(step, WRITERS)
    shared = random.Random(step).sample(range(POOL), 2)
    lagging = [f"of {writer % 2}, {number - back}" for back in (0, LAG, LAG + 2)]
    seeds = ["base 0", "base 1", *(f"pool {at}" for at in shared), *lagging, f"own {step}"]
    return {"step": step, "tensors": {seed: _tensor(seed) for seed in seeds}}


def _tensor(seed: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(blake3(seed.encode()).digest(7), "little"))
    return torch.randint(0, 256, (4 * TENSOR_ELEMENTS,), dtype=torch.uint8, generator=generator).view(torch.float32)


def digest(state: State) -> str:
    """Of every bit."""
    hasher = blake3(str(state["step"]).encode())
    for name, tensor in state["tensors"].items():
        hasher.update(name.encode()).update(tensor.view(torch.uint8).numpy())
    return hasher.hexdigest()


# --- what is said -------------------------------------------------------------------------------------------------------


def say(job: Job, what: str, **said: object) -> None:
    fd = os.open(_said_path(job.folder, job.name), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps({"what": what, **said}).encode() + b"\n")
    os.close(fd)


def heard(folder: str | Path, name: str) -> list[dict[str, Any]]:
    """What the processes of that name have said, oldest first."""
    path = _said_path(folder, name)
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def _said_path(folder: str | Path, name: str) -> Path:
    return Path(folder, f"{name}.jsonl")


# --- what they do -------------------------------------------------------------------------------------------------------


def write(job: Job, store: tsck.Store, chance: random.Random) -> None:
    """Saves to its own branch and to one that all share, and keeps its newest few on each."""
    own = f"runs/{job.number}"
    if own in store.branches():
        resumed = store.checkout(own)
        assert digest(resumed) == digest(make_state(resumed["step"]))
    number = sum(line["what"] == "begins" for line in heard(job.folder, job.name))
    while True:
        number += 1
        step = number * WRITERS + job.number
        say(job, "begins", step=step)
        state = make_state(step)
        ref = own if number % 2 else SHARED
        try:
            snapshot = store.put_snapshot(state, ref=ref, step=step, expect=tsck.LAST_SEEN if ref == own else tsck.ANY)
        except tsck.SnapshotExpiredError as exc:  # too little luck against a gc that never rests: nothing was acknowledged
            say(job, "starved", message=str(exc))
            continue
        say(job, "held", root=snapshot.root, digest=digest(state))
        _trim(job, store, ref, chance)


def _trim(job: Job, store: tsck.Store, ref: str, chance: random.Random) -> None:
    mine = [snapshot for snapshot in store.log(ref) if snapshot.step is not None and snapshot.step % WRITERS == job.number]
    old = mine[KEPT:]
    if not old:
        return
    for snapshot in old:
        say(job, "forgets", root=snapshot.root)
    store.forget(*(snapshot.root if chance.random() < 0.5 else f"{ref}@{snapshot.step}" for snapshot in old))
    if chance.random() < 0.2:
        regretted = chance.choice(old)
        try:
            store.undo(regretted.root)
        except (tsck.NotFoundError, tsck.SnapshotExpiredError):
            say(job, "too late")
        else:
            assert regretted.step is not None
            say(job, "held", root=regretted.root, digest=digest(make_state(regretted.step)), undone=True)


def collect(job: Job, store: tsck.Store, chance: random.Random) -> None:
    """Frees whatever it may, again and again: one of them at once, tombstones included, another one with a grace period."""
    greedy = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1, compact_below=0.6, tombstone_seconds=0)
    options = greedy if job.number == 0 else replace(greedy, grace_seconds=0.5, tombstone_seconds=86_400)
    while not store.branches():  # of a store with records and an empty log gc frees nothing
        time.sleep(0.05)
    while True:
        try:
            report = store.gc(options)
        except tsck.UnreadableError as exc:  # what it looked at was freed meanwhile, again and again
            say(job, "lost track", message=str(exc))
        else:
            say(job, "collected", deleted=report.deleted, freed=report.freed_bytes, rewritten=len(report.rewritten), notes=report.notes)
        time.sleep(chance.uniform(0, 0.2))


def read(job: Job, store: tsck.Store, chance: random.Random) -> None:
    """Reads what is there, at once or in pieces over some time: right, or forgotten by somebody."""
    while True:
        snapshots = store.log()
        if not snapshots:
            continue
        snapshot = chance.choice(snapshots)
        assert snapshot.step is not None
        expected = make_state(snapshot.step)
        try:
            if chance.random() < 0.5:
                assert digest(store.checkout(snapshot.root)) == digest(expected)
            else:
                _read_slowly(store, snapshot, expected["tensors"], chance)
        except (tsck.SnapshotExpiredError, tsck.NotFoundError) as exc:
            if snapshot.root not in _forgotten(job.folder):
                raise
            say(job, "missed", message=str(exc))
        else:
            say(job, "read", root=snapshot.root)


def _read_slowly(store: tsck.Store, snapshot: tsck.Snapshot, expected: dict[str, torch.Tensor], chance: random.Random) -> None:
    with store.open_snapshot(snapshot.root) as lazy:
        for name, tensor in expected.items():
            time.sleep(chance.uniform(0, 0.1))
            assert torch.equal(lazy[f"tensors.{name}"][:].view(torch.uint8), tensor.view(torch.uint8)), name


def _forgotten(folder: str) -> set[str]:
    said = (line for number in range(WRITERS) for line in heard(folder, f"writer-{number}"))
    return {line["root"] for line in said if line["what"] == "forgets"}


ROLES: Final = {"writer": write, "gc": collect, "reader": read}


def live(job: Job) -> NoReturn:
    """A process's whole life: it ends by SIGKILL, gives up, or leaves an error in a file."""
    torch.set_num_threads(1)
    code = 1
    try:
        with tsck.open(job.url, storage_options=job.storage_options, cache_dir=job.cache) as store:
            ROLES[job.role](job, store, random.Random(job.seed))
    except (tsck.UndecidedError, tsck.BackendUnavailableError) as exc:
        say(job, "gave up", message=repr(exc))
        code = GAVE_UP
    except BaseException:  # noqa: BLE001 - whatever it is, the conductor must see it
        Path(job.folder, f"{job.name}.err").write_text(traceback.format_exc())
    os._exit(code)
