"""Two processes publish one staged save, each of which may be paused or killed at every call of the store and of the disk.

The claims that keep them apart are taken away. No object of the store is deleted or replaced, the snapshot is published once, and whoever
lives learns that it is.
"""

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.staging.claims import Claims
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.session.group.process_groups import ProcessGroups
from tensorstore_ck.session.ref_fence import RefFence
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.resume_staged import resume_here
from tensorstore_ck.session.save.save_status import SaveStatus
from tests.backend.staging.places import PieceStore
from tests.effort import SOAK, effort, in_turns
from tests.end_to_end.crash.faulty import Death, Faults
from tests.session.staging.places import DISK, SECONDS, Process, ended, folder_of, leave_staged, process, require_all_well

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.usefixtures("quick", "no_claims")]
KEPT: Final = ("packs/", "parts/", "snapshots/")
NEVER: Final = 10**9
PAIRS: Final = effort(60, 0)


class PreconditionError(Exception):
    response = {"ResponseMetadata": {"HTTPStatusCode": 412}}  # noqa: RUF012 - as botocore's


class _Watched(MemoryBackend):
    """Creates objects exclusively, and notes what deletes one."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []

    def replace(self, name: str, data: Buffer) -> None:
        if name.startswith(KEPT) and name in self._objects:
            raise BackendUnavailableError(f"{name} exists") from PreconditionError()
        super().replace(name, data)

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        self.deleted += [name for name in names if name.startswith(KEPT)]
        super().delete(names)


class WatchedPieces(_Watched, PieceStore):
    """Takes objects in pieces."""


class WatchedWhole(_Watched):
    """Takes objects whole."""


class Stepper(Faults):
    """Pauses a process before its call number `at`; there it dies, or goes on."""

    def __init__(self, at: int, *, dies: bool) -> None:
        super().__init__()
        self._pause_at = at
        self._dies = dies
        self.is_waiting, self.goes_on = threading.Event(), threading.Event()
        """It is paused, or waits for the other process, or has ended."""

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if self.dead:
            raise Death
        self.calls += 1
        if self.calls == self._pause_at:
            self.struck = what
            self.is_waiting.set()
            assert self.goes_on.wait(SECONDS)
            if self._dies:
                self.dead = True
                raise Death
        return effect()


class _OfThread(Faults):
    """Those of the process whose thread it is."""

    def __init__(self) -> None:
        super().__init__()
        self.local = threading.local()

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        faults: Faults | None = getattr(self.local, "faults", None)
        return effect() if faults is None else faults.call(what, effect, tear, create=create)


OF_THREAD: Final = _OfThread()


class Taker(threading.Thread):
    """A process that publishes what is staged on the disk."""

    def __init__(self, server: MemoryBackend, path: Path, stepper: Stepper) -> None:
        super().__init__(daemon=True)
        self.stepper = stepper
        self.found: list[SnapshotRow] = []
        self.error: BaseException | None = None
        self._job = Process(server, path, store_faults=stepper, disk_faults=stepper)
        DISK.faults = OF_THREAD
        sleep = self._job.uploader.sleep

        def wait(seconds: float) -> None:
            stepper.is_waiting.set()
            sleep(seconds)

        self._job.uploader.sleep = wait

    def run(self) -> None:
        OF_THREAD.local.faults = self.stepper
        engine = self._job.engine
        assert engine.tier is not None
        try:
            engine.log.sync()
            context = SaveContext(engine, RefFence(), ProcessGroups(engine), wait_for_upload=lambda: False)
            for put in resume_here(context, engine.tier):
                self.found.append(put.publish(SaveStatus(put.ref, put.step)))
        except BaseException as exc:  # noqa: BLE001 - the test looks at it
            self.error = exc
        finally:
            self._job.folder.leave()
            self.stepper.is_waiting.set()

    def until_it_waits(self) -> None:
        assert self.stepper.is_waiting.wait(SECONDS)

    def until_it_ends(self) -> None:
        self.stepper.goes_on.set()
        self.join(SECONDS)
        assert not self.is_alive()

    def require_success(self) -> None:
        """It died as it should; or published the save, learned that it is, or found nothing left."""
        if self.stepper.dead:
            assert isinstance(self.error, Death)
        else:
            assert self.error is None, self.stepper.struck
            assert [info.step for info in self.found] in ([1], [])


@pytest.fixture
def no_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Claims, "take", lambda self, key: True)


@contextmanager
def bystander(server: MemoryBackend, path: Path) -> Iterator[None]:
    """A process that uses the folder, so that none sweeps it while the other is paused."""
    folder = folder_of(cast(PieceStore, server), path)
    folder.enter(lambda: None)
    try:
        yield
    finally:
        folder.leave()


def interleave(path: Path, server: MemoryBackend, first: Stepper, second: Stepper) -> bool:
    """The first is paused, then the second, then the first ends, then the second; False if the first has ended before its call."""
    cast(Any, DISK).faults = None
    leave_staged(cast(PieceStore, server), path, 1)
    with bystander(server, path):
        takers = [Taker(server, path, stepper) for stepper in (first, second)]
        for taker in takers:
            taker.start()
            taker.until_it_waits()
        was_paused = bool(first.struck)
        first.goes_on.set()
        while takers[0].is_alive() and takers[1].is_alive() and not second.goes_on.is_set():
            takers[0].join(0.01)
            if takers[0].is_alive() and second.struck:  # it may wait for what the second has locked
                second.goes_on.set()
        for taker in takers:
            taker.until_it_ends()
    DISK.faults = None
    for taker in takers:
        taker.require_success()
    with process(server, path) as last:
        last.store.finish_staged("job")
    require_all_well(cast(PieceStore, server), path, [0, 1])
    assert cast(_Watched, server).deleted == []
    return was_paused


STORES: Final = [WatchedPieces, WatchedWhole]
VARIANTS: Final = [(make, dies) for dies in (False, True) for make in STORES]


def test_one_is_paused_or_killed_at_every_call_and_the_other_publishes(tmp_path: Path) -> None:
    struck: set[str] = set()
    for at, (make, dies) in in_turns(range(1, 1000), VARIANTS):
        first = Stepper(at, dies=dies)
        if not interleave(tmp_path / f"{at}-{make.__name__}-{dies}", make(), first, Stepper(NEVER, dies=False)):
            break
        struck.add(first.struck.split()[0])
    assert {"get", "create", "size", "replace", "rename", "delete"} <= struck


def pairs() -> Iterator[tuple[int, int]]:
    if SOAK:
        yield from ((at, other) for at in range(1, 100) for other in range(1, 100))
        return
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    yield from ((draw.randrange(1, 60), draw.randrange(1, 60)) for _ in range(PAIRS))


def test_both_are_paused_or_killed(tmp_path: Path) -> None:
    for number, (at, other) in enumerate(pairs()):
        for _, (make, dying) in in_turns([number], [(make, dying) for dying in ("", "first", "second") for make in STORES]):
            steppers = Stepper(at, dies=dying == "first"), Stepper(other, dies=dying == "second")
            interleave(tmp_path / f"{number}-{make.__name__}-{dying}", make(), *steppers)


def test_the_process_that_staged_it_is_paused_or_killed_at_every_call_and_another_publishes(tmp_path: Path) -> None:
    """From the first call of the save on: whatever is staged by then is taken over."""
    for at, (make, dies) in in_turns(range(1, 1000), VARIANTS):
        server, path = make(), tmp_path / f"{at}-{make.__name__}-{dies}"
        stepper = Stepper(NEVER, dies=dies)
        with bystander_of(server, path), process(server, path, store_faults=stepper, disk_faults=stepper) as owner:
            owner.put(0).wait(SECONDS)
            stepper.calls, stepper._pause_at = 0, at
            pending = owner.put(1)
            pending.published.on_settled(partial(_note, stepper.is_waiting))
            assert stepper.is_waiting.wait(SECONDS)
            taker = Taker(server, path, Stepper(NEVER, dies=False))
            DISK.faults = OF_THREAD
            taker.start()
            taker.until_it_waits()
            stepper.goes_on.set()
            taker.until_it_ends()
            error = ended(pending)
        DISK.faults = None
        taker.require_success()
        assert isinstance(error, Death) if stepper.dead else error is None, stepper.struck
        is_staged = pending.staged.reached()
        with process(server, path) as last:
            last.store.finish_staged("job")
            steps = [info.step for info in reversed(last.store.log("job"))]
        assert steps == [0, 1] or (stepper.dead and not is_staged and steps == [0])
        require_all_well(cast(PieceStore, server), path, steps)
        assert server.deleted == []
        if not stepper.struck:
            assert at > 20, "the save makes more calls"
            return
    raise AssertionError("the enumeration did not end")


def _note(event: threading.Event, _: object) -> None:
    event.set()


@contextmanager
def bystander_of(server: MemoryBackend, path: Path) -> Iterator[None]:
    with process(server, path.with_name(f"{path.name}-other")):
        pass  # makes the store
    with bystander(server, path):
        yield
