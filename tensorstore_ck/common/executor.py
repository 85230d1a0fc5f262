"""Where long work on many objects runs: threads of this process, or an existing Dask cluster.

The pieces of work may run anywhere, more than once and in any order: each handles one pack, and writes only objects under new names.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, Final, Protocol, Self, TypeVar

from tensorstore_ck.common.extras import missing_extra
from tensorstore_ck.errors import BackendUnavailableError

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


class LocalThreads:
    """Threads of this process."""

    is_remote = False

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def run(self, work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
        """See `Executor`."""
        queue, waiting = iter(pieces), set[Future[Result]]()
        with ThreadPoolExecutor(self._threads, thread_name_prefix="tsck") as pool:
            try:
                while True:
                    waiting |= {pool.submit(work, piece) for piece in islice(queue, AHEAD * self._threads - len(waiting))}
                    if not waiting:
                        return
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            finally:
                for future in waiting:
                    future.cancel()


class DaskCluster:
    """The workers of a Dask cluster, which need this package and the same access to the stores. A context manager."""

    is_remote = True

    def __init__(self, address: str) -> None:
        """Connects.

        Raises:
            MissingExtraError: Dask is not installed.
            BackendUnavailableError: no scheduler answers at `address`.
        """
        try:
            import distributed  # noqa: PLC0415 - an extra
        except ImportError as exc:
            raise missing_extra("dask", "work on a Dask cluster") from exc
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
        queue, waiting = iter(pieces), 0
        with self._client.as_current():
            completed = self._distributed.as_completed()
        while True:
            threads = max(1, sum(self._client.nthreads().values()))
            for piece in islice(queue, max(0, AHEAD * threads - waiting)):
                completed.add(self._client.submit(work, piece, pure=False, retries=RETRIES))
                waiting += 1
            if not waiting:
                return
            future = next(completed)
            waiting -= 1
            yield future.result()
