"""A backend that notes failed reads which do not prove damage, even if a caller handles the error: after one, a repair marks nothing.

An unreadable source of a lost object may still be good.
"""

from collections.abc import Callable
from typing import Any

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.errors import StoreError, UnreadableError
from tensorstore_ck.maintenance.fsck.findings import UNREADABLE, kind_of


class ReadErrors:
    """Notes such errors of several backends. Thread-safe."""

    def __init__(self) -> None:
        self._found: list[StoreError] = []

    def noting(self, backend: Backend) -> Any:
        """`backend`, whose reads are noted."""
        return _NotedReads(backend, self._found)

    def require_none(self) -> None:
        """Raises the first one. Raises `UnreadableError`: an object could not be read."""
        for exc in self._found:
            raise UnreadableError(f"the repair stops, and marks nothing: {exc}", object_id=exc.object_id) from exc


class _NotedReads:
    """All other attributes are the inner backend's."""

    def __init__(self, inner: Backend, errors: list[StoreError]) -> None:
        self._inner = inner
        self._found = errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Notes the error."""
        data: bytes = self._noting(lambda: self._inner.get(name, max_bytes=max_bytes))
        return data

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Notes the error."""
        self._noting(lambda: self._inner.read_into(name, offset, target))

    def size(self, name: str) -> int:
        """Notes the error."""
        size: int = self._noting(lambda: self._inner.size(name))
        return size

    def _noting(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except StoreError as exc:
            if kind_of(exc) == UNREADABLE:
                self._found.append(exc)
            raise
