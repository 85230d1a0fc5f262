"""A store in memory that takes uploads in pieces, a staging folder on a disk, and processes that fail, die and come back in between."""

import contextlib
import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch

from tensorstore_ck.backend import s3_multipart_writer, s3_resumable_upload
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.resumable_upload import Upload
from tensorstore_ck.backend.staging import ReadThroughBackend, Staging, StagingFolder, StagingTier, Uploader
from tensorstore_ck.backend.staging import folder as folder_module
from tensorstore_ck.backend.staging import sparse_files as copies_module
from tensorstore_ck.backend.staging.upload_journal import UploadJournal
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.engine.range_verifier import open_verifier
from tensorstore_ck.errors import BackendUnavailableError, NoSpaceError, PermissionDeniedError, StoreError
from tensorstore_ck.events import Event
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.store import Store
from tests.backend.staging.places import FakeCreator, PieceStore
from tests.effort import PATIENCE_SECONDS
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend

SECONDS: Final = PATIENCE_SECONDS
KIB: Final = 1 << 10
NAP_SECONDS: Final = 0.002
"""Between tries."""
PIECE_BYTES: Final = 64 * KIB
FROZEN_BYTES: Final = 100 * KIB
MOVING_BYTES: Final = 150 * KIB
CAPACITY_BYTES: Final = 64 << 20

_CHANGING: Final = {"rename", "unlink", "utime", "makedirs"}


class WholeClient(FaultyBackend):
    """One process's connection to the server."""

    def __init__(self, server: MemoryBackend, faults: Faults) -> None:
        super().__init__(cast(Backend, server), faults, atomic_put=True)
        self.is_local = False


class Client(WholeClient):
    """One process's connection to a server that takes objects in pieces."""

    def begin_upload(self, name: str, size_bytes: int) -> Upload:
        return s3_resumable_upload.begin(FakeCreator(self.call), name, name, size_bytes)

    def resume_upload(self, name: str, size_bytes: int, token: str) -> Upload:
        return s3_resumable_upload.resume(FakeCreator(self.call), name, name, size_bytes, token)

    def give_up_upload(self, name: str, token: str) -> None:
        self._faults.call(f"give up {name}", lambda: self._inner.give_up_upload(name, token))  # type: ignore[attr-defined]

    def call(self, action: str, name: str, method: str, **arguments: Any) -> dict[str, Any]:
        inner = cast(PieceStore, self._inner)
        reply: dict[str, Any] = self._faults.call(f"{method} {name}", lambda: inner.call(action, name, method, **arguments))
        return reply


class Life(Faults):
    """No faults of its own: it ends with that of another part of the same process."""

    def __init__(self, other: Faults | None) -> None:
        super().__init__()
        self._other = other

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if self._other is not None and self._other.dead:
            raise Death
        return effect()


UPLOADS: Final = ("put_object", "create_multipart_upload", "upload_part", "open")


class Server(Faults):
    """Answers no call that begins with one of `refused`, until a test changes that; `seen` has what it did."""

    def __init__(self, *refused: str) -> None:
        super().__init__()
        self.refused: tuple[str, ...] = refused
        self.seen: list[str] = []

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if what.startswith(self.refused):
            raise BackendUnavailableError(f"injected: {what}")
        self.seen.append(what)
        return effect()

    def refuse(self, *refused: str) -> None:
        self.refused = refused


class Hanging(Server):
    """Does not answer while `answers` is not set, and does then what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        assert self.answers.wait(SECONDS)
        return super().call(what, effect, tear, create=create)


class Full(Faults):
    """Counts only what uses space."""

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if what.split(maxsplit=1)[0] in ("open", "append", "close", "put", "replace", "rename", "makedirs"):
            return super().call(what, effect, tear, create=create)
        return effect()


class FaultyOs:
    """The module `os`, whose changes of a disk fail and die as `faults` say."""

    faults: Faults | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if self.faults is None or name not in _CHANGING:
            return found
        return lambda *args, **kwargs: self._strike(f"{name} {_tail(args[0])}", lambda: found(*args, **kwargs))

    def _strike(self, what: str, effect: Callable[[], Any]) -> Any:
        try:
            return effect() if self.faults is None else self.faults.call(what, effect)
        except NoSpaceError as exc:
            raise OSError(errno.ENOSPC, str(exc)) from exc


def _tail(path: object) -> str:
    return "/".join(str(path).split("/")[-3:])


DISK: Final = FaultyOs()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small pieces, no waiting, and a disk that can fail."""
    monkeypatch.setattr(s3_multipart_writer, "PIECE_BYTES", PIECE_BYTES)
    for module in ("context", "staged_save"):
        monkeypatch.setattr(f"tensorstore_ck.session.save.{module}.next_delay", lambda *_, **__: NAP_SECONDS)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nothing here loses its power
    monkeypatch.setattr(folder_module, "os", DISK)
    monkeypatch.setattr(copies_module, "os", DISK)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small states: waking others costs more than they help
    yield
    torch.set_num_threads(threads)
    DISK.faults = None


class Process:
    """One process's open store: it dies when its faults say so."""

    def __init__(
        self,
        server: MemoryBackend,
        path: Path,
        *,
        store_faults: Faults | None = None,
        disk_faults: Faults | None = None,
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> None:
        config = read_config(cast(Backend, server)) or init_store(cast(Backend, server))
        client = Client if isinstance(server, PieceStore) else WholeClient
        backend = cast(Backend, client(server, store_faults or Life(disk_faults)))
        folder = StagingFolder(path, config.uuid, capacity_bytes, open_verifier)
        folder.check()
        disk_faults = disk_faults or (Life(store_faults) if store_faults is not None else None)
        if disk_faults is not None:
            faulty = FaultyBackend(LocalBackend(folder.path), disk_faults, atomic_put=True)
            folder.unsent = cast(LocalBackend, FaultyBackend(folder.unsent, disk_faults, atomic_put=False))
            folder._root = cast(LocalBackend, faulty)
            folder.journal = UploadJournal(cast(Backend, faulty))
        DISK.faults = disk_faults
        engine = make_engine(backend, config, MemoryTable(), sleep=lambda _: None)
        tiered = ReadThroughBackend(folder, backend)
        uploader = Uploader(folder, backend, max_parallel_requests=1, sleep=lambda _: time.sleep(NAP_SECONDS))
        engine.backend, engine.tier = tiered, StagingTier(folder, uploader, tiered, Staging(path))
        self.folder = folder
        self.events: list[Event] = []
        self.engine = engine
        self.uploader = uploader

    @cached_property
    def store(self) -> Store:
        """Opened, which continues what is staged."""
        store = Store(self.engine, host_memory_bytes=64 << 20)
        store.on_event(self.events.append)
        return store

    @property
    def view(self) -> Any:
        self.store.engine.log.sync()
        return self.store.engine.log.view()

    def put(self, step: int, ref: str = "job", **options: Any) -> PendingSnapshot:
        return self.store.put_snapshot_async(state_of(step), ref=ref, step=step, **options)

    def stage(self, step: int, ref: str = "job", **options: Any) -> PendingSnapshot:
        """Saves, and waits until it is staged."""
        pending = self.put(step, ref, **options)
        pending.staged.wait(SECONDS)
        return pending

    def lose_claims(self) -> None:
        """Another process can take over what this one staged, as if it were gone."""
        self.folder._claims.release_all()

    def put_at(self, faults: Faults, at: int, told: "Acknowledged", *steps: int) -> None:
        """Saves these, and meets the fault of `faults` at their n-th call."""
        faults.calls, faults.at = 0, at
        told.put(self, *steps)

    def error_of_put(self, step: int) -> BaseException | None:
        """Saves and waits; the error, raised at once or later."""
        try:
            return ended(self.put(step))
        except Exception as exc:  # noqa: BLE001 - tests look at it
            return exc

    def told(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


class Acknowledged:
    """What the processes on one disk learned."""

    def __init__(self) -> None:
        self.staged: set[int] = set()
        self.published: set[int] = set()

    def put(self, job: Process, *steps: int) -> None:
        """Saves these, and waits for the end of each."""
        pendings = []
        for step in steps:
            for _ in steps:
                with contextlib.suppress(StoreError, Death):  # what an earlier one failed with
                    pendings.append((step, job.put(step)))
                    break
        for step, pending in pendings:
            ended(pending)
            self.staged |= {step} if pending.staged.reached() else set()
            self.published |= {step} if pending.published.reached() else set()


def require_nothing_lost(server: MemoryBackend, path: Path, told: Acknowledged) -> None:
    """The next process with that disk publishes what was staged, once and in order, and nothing is left."""
    with process(server, path) as job:
        job.store.finish_staged("job")
        found = [snapshot.step for snapshot in reversed(job.store.log("job"))]
    assert found == sorted(set(found))  # type: ignore[type-var]
    assert told.staged | told.published <= set(found)
    require_all_well(server, path, found)


@contextlib.contextmanager
def process(server: MemoryBackend, path: Path, **options: Any) -> Iterator[Process]:
    made = Process(server, path, **options)
    assert made.store is not None
    try:
        yield made
    finally:
        made.store.drain(0)
        made.folder.leave()  # as the kernel sees to when a process is gone


@contextlib.contextmanager
def published(server: MemoryBackend, path: Path, connection: Faults | None = None) -> Iterator[Process]:
    """One that has published step 0."""
    with process(server, path, store_faults=connection) as job:
        job.put(0).wait(SECONDS)
        yield job


def state_of(step: int) -> dict[str, Any]:
    """A tensor that stays, and one whose blocks are new."""
    return {"frozen": _noise(-1, FROZEN_BYTES), "moving": _noise(step, MOVING_BYTES), "step": step}


def _noise(seed: int, size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(size_bytes)), dtype=torch.uint8)


def leave_staged(server: MemoryBackend, path: Path, *steps: int, **options: Any) -> None:
    """A job that published step 0, staged these, and ended."""
    refusing = Server()
    with process(server, path, store_faults=refusing) as job:
        job.put(0).wait(SECONDS)
        refusing.refuse(*UPLOADS)
        for step in steps:
            job.stage(step, **options)
        assert [pending.step for pending in job.store.drain(0).staged] == list(steps)


@contextlib.contextmanager
def refused_uploads(why: str, *methods: str) -> Iterator[None]:
    """The store refuses uploads, and these methods, by an error that does not pass."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionDeniedError(why)

    with pytest.MonkeyPatch.context() as patch:
        for method in ("call", *methods):
            patch.setattr(Client, method, refuse)
        yield


def half_uploaded(job: Process, connection: Server, step: int) -> PendingSnapshot:
    """Small objects are in the store, the pack is not."""
    reached = threading.Event()
    job.store.on_event(lambda event: reached.set() if event.fields.get("what") == "an upload" else None)
    connection.refuse("upload_part")
    pending = job.put(step)
    assert reached.wait(SECONDS)
    return pending


def ended(pending: PendingSnapshot) -> BaseException | None:
    """Waits for the end: the error, if it was one."""
    try:
        pending.wait(SECONDS)
    except BaseException as exc:  # noqa: BLE001 - tests look at it
        return exc
    return None


def check(store: Store, step: int, address: str | None = None) -> None:
    """What is stored of a step is what was saved."""
    found, expected = store.checkout(address or f"job@{step}"), state_of(step)
    assert found["step"] == step
    for name in ("frozen", "moving"):
        assert torch.equal(found[name], expected[name]), f"{name} of step {step} is wrong"


def leftovers(folder: StagingFolder) -> list[str]:
    """What is there of saves that are over, copies apart."""
    found = [info.name for info in (*LocalBackend(folder.path).list(""), *LocalBackend(folder.path).list_uploads())]
    return [name for name in found if name != "users" and not name.startswith("copies/")]


def require_all_well(server: MemoryBackend, path: Path, steps: list[int | None]) -> None:
    """Another process, on another host, sees just these steps, each as it was saved; and this host's disk has nothing left."""
    with process(server, path.with_name("elsewhere")) as other:
        assert [snapshot.step for snapshot in reversed(other.store.log("job"))] == steps
        for step in steps:
            assert step is not None
            check(other.store, step)
        view = other.view
        assert [pin.owner for pin in view.pins()] == []
        assert [info.step for _, info in view.all_staged()] == []
        report = other.store.fsck(read_data=True)
        assert report.ok, report.findings
    assert leftovers(folder_of(server, path)) == []


def folder_of(server: MemoryBackend, path: Path) -> StagingFolder:
    """What a process with that disk has there."""
    config = read_config(cast(Backend, server))
    assert config is not None
    return StagingFolder(path, config.uuid, CAPACITY_BYTES)
