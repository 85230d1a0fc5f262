"""Stores to copy between, what they hold, and a backend that watches."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.executor import Piece, Result
from tensorstore_ck.engine.opening import init_store
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.store import Store
from tests.maintenance.fsck.stores import ADDRESSES, is_exact

EVERYTHING = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1.0, compact_below=0.9)
WRITES = ("put", "create", "open_writer", "replace", "delete")


def empty() -> Backend:
    backend = MemoryBackend()
    init_store(backend)
    return backend


def contents(store: Store) -> dict[str, object]:
    """All that a copy carries, as users see it."""
    view = store.engine.log
    view.sync()
    refs: dict[str, object] = {
        name: [
            (snap.root, snap.step, snap.parent, dict(snap.metrics), snap.mark, snap.reason, snap.logical_bytes) for snap in store.log(name)
        ]
        for name in (*store.branches(), *store.tags())
    }
    return {**refs, "metadata": {root: store.show(root).metadata for root in {snap.root for snap in store.log()}}}


def assert_same(source: Store, target: Store) -> None:
    assert contents(source) == contents(target)
    assert set(source.tags()) == set(target.tags())
    for address, number in ADDRESSES.items():
        assert is_exact(target.checkout(address, allow_marked=True), number)
    report = target.fsck(read_data=True)
    assert report.ok, report.findings


class Watched:
    """A backend that notes the calls that go through it, and lets `before` act ahead of each."""

    def __init__(self, inner: Backend, before: Callable[[str, str], object] = lambda call, name: None) -> None:
        self._inner = inner
        self._before = before
        self.calls: list[tuple[str, str]] = []
        self.bytes_read = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("get", "get_if_there", *WRITES):
            return found

        def call(what: str, *arguments: Any, **more: Any) -> Any:
            self._note("get" if name == "get_if_there" else name, what)
            return found(what, *arguments, **more)

        return call

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self._note("read_into", name)
        self.bytes_read += len(target)
        self._inner.read_into(name, offset, target)

    def _note(self, call: str, name: str) -> None:
        self.calls.append((call, name))
        self._before(call, name)

    def writes(self) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] in WRITES]


def at_write(inner: Backend, at: int, action: Callable[[], object]) -> Watched:
    """A backend in which `action` happens before the call number `at` that writes."""
    watched = Watched(inner, lambda call, name: action() if call in WRITES and len(watched.writes()) == at else None)
    return watched


class Elsewhere:
    """As a cluster: what travels is pickled, a piece may run twice, and results come in any order."""

    is_remote = True

    def run(self, work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
        carried = [pickle.loads(pickle.dumps((work, piece))) for piece in pieces for _ in range(2)]
        results = [pickle.loads(pickle.dumps(carried_work(piece))) for carried_work, piece in carried]
        yield from reversed(results[1::2])
