"""Tests whether a backend keeps its guarantees, and how fast it is.

Some S3 servers accept conditional writes and ignore the condition; a shared store on one would lose commits. So `init` runs
`probe_create`; `probe` reports more to a user. Both write below ``probe/<ulid>/`` only, and remove it.
Uses only the `Backend` protocol.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from tensorstore_ck.backend.protocol import Backend, Created, writing
from tensorstore_ck.common.ids import new_ulid, ulid_text
from tensorstore_ck.errors import BackendUnavailableError, MissingObjectError, PermissionDeniedError, StoreError, UnsafeBackendError

PROBE_FOLDER: Final = "probe"
RACERS: Final = 4
QUICK_ROUNDS: Final = 2
ROUNDS: Final = 8
RACE_SECONDS: Final = 5
"""No further round begins after this: a contested create costs 1.5 s on some servers."""
SPEED_BYTES: Final = 64 << 20
PIECE_BYTES: Final = 4 << 20
RANGE_BYTES: Final = 8 << 20
SECOND_UPLOAD_BYTES: Final = 16 << 20
"""Bytes: more than one request to S3 sends."""
TIMED_CREATES: Final = 5

T = TypeVar("T")


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe."""

    exclusive_create: bool
    """Whether exactly one of several writers of one name succeeds, and the others learn it. Every store with several writers needs this."""
    read_after_write: bool
    list_after_write: bool
    write_bytes_per_second: float
    read_bytes_per_second: float
    refuses_second_put: bool
    """An object written with one request is not overwritten by another writer of the same name."""
    refuses_second_upload: bool
    """The same for an object written in pieces: a large pack."""
    create_seconds: float
    """Median of an uncontested create, for which a commit waits."""
    problems: tuple[str, ...]
    """The failed check, for a person to read."""


def probe_create(backend: Backend) -> bool:
    """Whether `create` is exclusive, as far as two quick races show."""
    return not create_problem(backend)


def create_problem(backend: Backend) -> str:
    """Why `create` is not exclusive, by two quick races; empty if it is."""
    problems, _ = in_folder(backend, lambda folder: _create_problems(backend, folder, QUICK_ROUNDS))
    return next(iter(problems), "")


def probe(backend: Backend) -> ProbeResult:
    """Tests everything; takes some seconds, and 64 MiB of space meanwhile."""
    result, left_behind = in_folder(backend, lambda folder: _probe(backend, folder))
    return replace(result, problems=result.problems + left_behind)


def _probe(backend: Backend, folder: str) -> ProbeResult:
    create_problems = _create_problems(backend, folder, ROUNDS)
    read_problems = _read_problems(backend, folder)
    list_problems = _list_problems(backend, folder)
    create_seconds = float("nan") if create_problems else _time_creates(backend, folder)
    write_speed, read_speed = _measure_speed(backend, f"{folder}speed")
    refuses_put, refuses_upload = _refuses_second_put(backend, f"{folder}put"), _refuses_second_upload(backend, f"{folder}speed")
    return ProbeResult(
        exclusive_create=not create_problems,
        read_after_write=not read_problems,
        list_after_write=not list_problems,
        write_bytes_per_second=write_speed,
        read_bytes_per_second=read_speed,
        refuses_second_put=refuses_put,
        refuses_second_upload=refuses_upload,
        create_seconds=create_seconds,
        problems=(*create_problems, *read_problems, *list_problems),
    )


def in_folder(backend: Backend, work: Callable[[str], T]) -> tuple[T, tuple[str, ...]]:
    """Runs `work` on a new folder; returns its result, and the problem if the folder could not be removed."""
    folder = f"{PROBE_FOLDER}/{ulid_text(new_ulid())}/"
    problems: tuple[str, ...] = ()
    try:
        result = work(folder)
    finally:
        try:
            backend.delete([info.name for info in backend.list(folder)])
        except StoreError as exc:
            problems = (f"could not remove {folder}: {exc}",)
    return result, problems


def _create_problems(backend: Backend, folder: str, rounds: int) -> list[str]:
    name = f"{folder}twice"
    try:
        first, second = backend.create(name, b"first"), backend.create(name, b"second")
    except UnsafeBackendError as exc:
        return [str(exc)]
    if first is Created.UNKNOWN or second is Created.UNKNOWN:
        raise BackendUnavailableError(f"{backend.url} did not answer a create; try again", object_id=name)
    if second is Created.CREATED or backend.get(name, max_bytes=64) != b"first":
        return ["a second create of the same name was not refused: the backend ignores the condition"]
    began = time.monotonic()
    with ThreadPoolExecutor(RACERS) as threads:
        for number in range(rounds):
            if number and time.monotonic() - began > RACE_SECONDS:
                break
            problem = _race(backend, f"{folder}race-{number}", threads)
            if problem:
                return [problem]
    return []


def _race(backend: Backend, name: str, threads: ThreadPoolExecutor) -> str:
    """Lets several threads create `name` at once; returns the problem, if any."""
    start = threading.Barrier(RACERS)
    bodies = [f"racer {number}".encode() for number in range(RACERS)]

    def create(body: bytes) -> Created:
        start.wait()
        return backend.create(name, body)

    outcomes = list(threads.map(create, bodies))
    winners = [body for body, outcome in zip(bodies, outcomes, strict=True) if outcome is Created.CREATED]
    if len(winners) > 1:
        return f"{len(winners)} of {RACERS} writers that created one name at once each got a success"
    try:
        stored = backend.get(name, max_bytes=64)
    except MissingObjectError:
        return "an object that writers raced to create is not there" if winners or Created.EXISTS in outcomes else ""
    if stored not in (winners or bodies):
        return "an object that writers raced to create does not hold the winner's bytes"
    return ""


def _read_problems(backend: Backend, folder: str) -> list[str]:
    for number in range(4):
        name, body = f"{folder}read-{number}", os.urandom(1024)
        backend.put(name, body)
        try:
            if backend.get(name, max_bytes=len(body)) == body and backend.size(name) == len(body):
                continue
        except MissingObjectError:
            pass
        return ["an object just written could not be read back"]
    return []


def _list_problems(backend: Backend, folder: str) -> list[str]:
    for number in range(4):
        name = f"{folder}list/{number}"
        backend.put(name, b"x")
        if name not in {info.name for info in backend.list(f"{folder}list/")}:
            return ["an object just written was not in a listing"]
    try:
        backend.delete([name])
    except PermissionDeniedError:
        return []  # a writer's credentials: `in_folder` reports that the folder stays
    if name in {info.name for info in backend.list(f"{folder}list/")}:
        return ["an object just deleted was still in a listing"]
    return []


def _refuses_second_put(backend: Backend, name: str) -> bool:
    backend.put(name, b"first")
    with suppress(BackendUnavailableError):
        backend.put(name, b"second")
    try:
        return backend.get(name, max_bytes=64) == b"first"
    except MissingObjectError:
        return False


def _refuses_second_upload(backend: Backend, name: str) -> bool:
    """Whether an upload under the name of an object of random bytes is refused."""
    with suppress(BackendUnavailableError), writing(backend, name) as writer:
        for _ in range(SECOND_UPLOAD_BYTES // PIECE_BYTES):
            writer.append([bytes(PIECE_BYTES)])
    head = bytearray(64)
    backend.read_into(name, 0, memoryview(head))
    return any(head)


def _time_creates(backend: Backend, folder: str) -> float:
    seconds = []
    for number in range(TIMED_CREATES):
        began = time.perf_counter()
        backend.create(f"{folder}timed-{number}", b"x" * 512)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _measure_speed(backend: Backend, name: str) -> tuple[float, float]:
    """Bytes per second of one large write and of parallel range reads."""
    piece = os.urandom(PIECE_BYTES)
    began = time.perf_counter()
    with writing(backend, name) as writer:
        for _ in range(SPEED_BYTES // PIECE_BYTES):
            writer.append([piece])
    written = time.perf_counter()

    def read(offset: int) -> None:
        backend.read_into(name, offset, memoryview(bytearray(RANGE_BYTES)))

    with ThreadPoolExecutor(RACERS) as threads:
        list(threads.map(read, range(0, SPEED_BYTES, RANGE_BYTES)))
    return SPEED_BYTES / (written - began), SPEED_BYTES / (time.perf_counter() - written)
