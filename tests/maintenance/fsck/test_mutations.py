"""5,000 seeded mutations: right bytes or one of our errors, fsck finds every one that matters, and another store repairs them.

Every store gets one to five at a time, so that damages meet: flipped and zeroed bytes, cut and grown objects, swaps, deletions, and objects
that replaced others. Three quarters of the stores are repaired from a copy of the same store, the rest from one with other names.
"""

import os
import random
from collections.abc import Iterator

import pytest

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import StoreError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.log.checkpoint import dump
from tensorstore_ck.maintenance.fsck import FsckOptions, FsckReport, run_fsck, run_repair
from tensorstore_ck.maintenance.fsck.check_log import check_log
from tests.effort import effort
from tests.maintenance.fsck.stores import backend_of, contents, failing_roots, names, reopen
from tests.maintenance.fsck.test_repair import TWIN, Objects, engine_of, other_engine, with_moved

MUTATIONS = effort(1_200, 5_000)
RUNS = 4
FIRST_SEED = 20_261_121


def objects() -> Objects:
    """One of everything: relocations in force, a checkpoint, a tag, a mark."""
    backend = backend_of(with_moved(chain=False))
    log = check_log(backend, prefix="log", uuid=None)
    with log.table.batch() as batch:
        sealed = dump(batch, log.last, log.last_hash or Digest(bytes(32)))
    assert sealed is not None
    backend.put(f"checkpoint/{log.last:020d}", sealed)
    return contents(backend)


OBJECTS = objects()
KINDS = ("store.json", "log/", "checkpoint/", "snapshots/", "parts/", "packs/", "moved/")
LAST_ENTRY = max(name for name in OBJECTS if name.startswith("log/"))
(CHECKPOINT,) = (name for name in OBJECTS if name.startswith("checkpoint/"))


class Mutator:
    """Breaks a store."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.objects = dict(OBJECTS)
        self.from_copy = self._random.random() < 0.75
        self._kinds = KINDS if self.from_copy else KINDS[2:]
        self.count = self._random.randint(1, 5)
        self.done = [self._mutate() for _ in range(self.count)]

    def changed(self) -> set[str]:
        """Objects that are not what they were."""
        return {name for name, data in OBJECTS.items() if self.objects.get(name) != data}

    def _mutate(self) -> str:
        kind = self._random.choice(self._kinds)
        of_kind = [name for name in OBJECTS if name.startswith(kind)]
        name = self._random.choice(of_kind)
        data = self.objects.get(name, b"")
        at = self._random.randrange(max(1, len(data)))
        what = self._random.choice(("flip", "flip", "zero", "cut", "grow", "swap", "delete", "replace"))
        if what == "delete":
            self.objects.pop(name, None)
        elif what == "swap":
            other = self._random.choice(of_kind)
            theirs = self.objects.pop(other, None)
            self.objects.pop(name, None)
            self.objects |= {other: data} | ({name: theirs} if theirs is not None else {})
        else:
            self.objects[name] = {
                "flip": lambda: data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :] if data else b"",
                "zero": lambda: data[:at] + bytes(min(16, len(data) - at)) + data[at + 16 :],
                "cut": lambda: data[:at],
                "grow": lambda: data + self._random.randbytes(self._random.randint(1, 100)),
                "replace": lambda: self._random.choice(list(OBJECTS.values())),
            }[what]()
        return f"{what} {name}"


def seeds(run: int) -> Iterator[int]:
    """Enough for the run's share of mutations."""
    mutations, seed = 0, FIRST_SEED + run * MUTATIONS
    while mutations < MUTATIONS // RUNS:
        yield seed
        mutations += Mutator(seed).count
        seed += 1


def assert_found(report: FsckReport, broken: Mutator) -> None:
    """Each object that is not what it was is named; of neighbouring log entries that are gone, the first.

    A missing object is named by those that need it: if they are damaged, too, fsck finds it when they are repaired.
    """
    changed = broken.changed()
    named = {finding.object for finding in report.findings}
    gone = changed - broken.objects.keys()
    parents = {name for name in changed if name.startswith(("log/", "snapshots/", "parts/", "moved/"))}
    hidden = gone if parents - gone or len(gone) > 1 else set()
    assert {name for name in changed if not name.startswith("log/")} - hidden - {CHECKPOINT} <= named
    assert CHECKPOINT in named or CHECKPOINT not in changed or CHECKPOINT in gone
    if any(name.startswith("log/") for name in changed):
        assert any(name.startswith("log/") for name in named)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tensorstore_ck.BrokenLogWarning")  # readers go on before a damaged log entry
@pytest.mark.parametrize("run", range(RUNS))
def test_mutations(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # a thread for each small step would take most of the time
    copy, twin = other_engine(OBJECTS), other_engine(TWIN)
    for seed in seeds(run):
        broken = Mutator(seed)
        try:
            check(broken, copy if broken.from_copy else twin)
        except BaseException as exc:
            exc.add_note(f"seed {seed}, {'a copy' if broken.from_copy else 'a twin'}: {', '.join(broken.done)}")
            raise


def check(broken: Mutator, other: Engine) -> None:
    backend, changed = backend_of(broken.objects), broken.changed()
    is_lost = {LAST_ENTRY, CHECKPOINT} <= changed  # nothing left vouches for the last entry
    try:
        failing = set(failing_roots(backend))
    except StoreError:
        failing = {"all"}
    report = run_fsck(engine_of(backend), read_data=True)
    if not is_lost:
        assert_found(report, broken)
        assert report.ok <= (not failing)
    repaired = run_repair(engine_of(backend), FsckOptions(read_data=True), other=other)
    assert set(names(backend)) >= set(broken.objects)
    if not is_lost:
        assert repaired.ok, repaired.after.findings
        assert list(failing_roots(backend)) == []
        assert run_fsck(engine_of(backend), read_data=True).ok


def test_gc_runs_on_a_repaired_store() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + 10):
        broken = Mutator(seed)
        if {LAST_ENTRY, CHECKPOINT} <= broken.changed():
            continue
        backend = backend_of(broken.objects)
        run_repair(engine_of(backend), FsckOptions(read_data=True), other=other_engine(OBJECTS if broken.from_copy else TWIN))
        for _ in range(2):
            reopen(backend).gc(GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1))
        assert list(failing_roots(backend)) == []
        assert run_fsck(engine_of(backend), read_data=True).ok
