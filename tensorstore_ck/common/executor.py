"""Runs long work on many objects: threads of this process, or an existing Dask cluster.

The pieces of work may run anywhere, more than once and in any order: each writes only objects under new names.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from queue import SimpleQueue
from typing import Any, Final, Protocol, Self, TypeVar

from tensorstore_ck.common.extras import extra
from tensorstore_ck.common.threads import Helper
from tensorstore_ck.errors import BackendUnavailableError, InvalidOptionError

Piece = TypeVar("Piece")
Result = TypeVar("Result")

AHEAD: Final = 4
"""Pieces queued per worker, so that none is idle and the queue stays short."""
RETRIES: Final = 3
CONNECT_SECONDS: Final = 30


class Executor(Protocol):
    """Runs pieces of work."""

    is_remote: bool
    """Whether pieces and results go to other processes: then they, and the function, must be picklable."""

    def run(self, work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
        """The results in the order of completion; raises the first error. Pieces are drawn lazily."""


def require_no_rate(rate: object, executor: Executor | None) -> None:
    """Raises `InvalidOptionError` for a rate limit where other processes do the work."""
    if rate is not None and executor is not None and executor.is_remote:
        raise InvalidOptionError(
            "a rate limit holds for this process only: leave it out, or run without the cluster", object_id="rate limit"
        )


class LocalThreads:
    """Threads of this process."""

    is_remote = False

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def run(self, work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
        """See `Executor`."""
        queue, lock = iter(pieces), threading.Lock()
        ahead, results = SimpleQueue[bool](), SimpleQueue[Result | _End]()
        for _ in range(AHEAD * self._threads):
            ahead.put(True)

        def loop() -> None:
            end = _End()
            try:
                while ahead.get():
                    with lock:
                        drawn = list(islice(queue, 1))
                    if not drawn:
                        break
                    results.put(work(drawn[0]))
            except BaseException as exc:  # noqa: BLE001 - raised by the caller's thread
                end.error = exc
            results.put(end)

        helpers = list[Helper]()
        try:
            for _ in range(self._threads):
                helpers.append(Helper(loop, "tsck"))
                try:
                    helpers[-1].start()
                except (RuntimeError, MemoryError):
                    helpers.pop()
                    break
            if not helpers:
                yield from map(work, queue)
            yield from _results(results, ahead, len(helpers))
        finally:
            with lock:
                queue = iter(())
            for _ in helpers:
                ahead.put(False)
            for helper in helpers:
                helper.end()


class _End:
    """The last result of a thread."""

    error: BaseException | None = None


def _results(results: "SimpleQueue[Result | _End]", ahead: SimpleQueue[bool], running: int) -> Iterator[Result]:
    """What `running` threads return. A function of its own, so that `finally` ends them after Ctrl-C: see common/waiting.py."""
    while running:
        result = results.get()
        if not isinstance(result, _End):
            yield result
            ahead.put(True)
            continue
        running -= 1
        if result.error is not None:
            raise result.error


class DaskCluster:
    """The workers of a Dask cluster, which need this package and the same access to the stores. A context manager."""

    is_remote = True

    def __init__(self, address: str) -> None:
        """Connects.

        Raises:
            MissingExtraError: Dask is not installed.
            BackendUnavailableError: no scheduler answers at `address`.
        """
        with extra("dask", "work on a Dask cluster"):
            import distributed  # noqa: PLC0415 - an extra
        self._distributed: Any = distributed
        try:
            self._client: Any = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, TimeoutError, ValueError) as exc:
            raise BackendUnavailableError(f"no Dask scheduler answers at {address!r}: {exc}", object_id=address) from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def run(self, work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
        """See `Executor`. A piece whose worker dies runs again on another one."""
        queue = iter(pieces)
        with self._client.as_current():
            completed = self._distributed.as_completed()
        futures = set[Any]()
        try:
            while True:
                threads = max(1, sum(self._client.nthreads().values()))
                for piece in islice(queue, max(0, AHEAD * threads - len(futures))):
                    futures.add(future := self._client.submit(work, piece, pure=False, retries=RETRIES))
                    completed.add(future)
                if not futures:
                    return
                futures.remove(future := next(completed))
                yield future.result()
        finally:
            self._client.cancel(list(futures))  # after an error: what is queued would still write
