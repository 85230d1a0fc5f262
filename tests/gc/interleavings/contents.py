"""What a backend holds, as an immutable value, and what each call does to it: a memory backend that can go back in time.

Equal contents are one object, so that states of an exploration are compared by identity.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from tensorstore_ck.backend.memory import MemoryBackend

MODIFIED_NS: Final = 1_700_000_000_000_000_000
"""When every object was written, by the backend's clock: time plays no part in any safety argument."""


class Request(NamedTuple):
    """One call that an actor makes of its backend."""

    kind: str
    """get, read, size, put, replace, create, list or delete."""
    name: str
    data: bytes = b""
    offset: int = 0
    length: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Response(NamedTuple):
    """What came back: ok, missing, short, exists (a name that was not new), full (no space), unknown or down (no usable answer)."""

    kind: str
    value: object = None


OK: Final = Response("ok")
DOWN: Final = Response("down")
FULL: Final = Response("full")
UNKNOWN: Final = Response("unknown")


class Contents:
    """Objects by name. Made by a `Space` only; `log_end` is the number of the last log entry."""

    __slots__ = ("_next", "_space", "log_end", "objects")

    def __init__(self, space: "Space", objects: Mapping[str, bytes], log_end: int) -> None:
        self._space = space
        self.objects = objects
        self.log_end = log_end
        self._next: dict[tuple[str, bytes | None], Contents] = {}

    def with_object(self, name: str, data: bytes) -> "Contents":
        """With that object, instead of any of its name."""
        return self._changed(name, data)

    def without(self, name: str) -> "Contents":
        """Without that object."""
        return self if name not in self.objects else self._changed(name, None)

    def entry(self, n: int) -> bytes:
        """The bytes of a log entry."""
        return self.objects[log_name(n)]

    def backend(self) -> MemoryBackend:
        """A backend that holds a copy."""
        backend = MemoryBackend(clock=lambda: MODIFIED_NS)
        for name, data in self.objects.items():
            backend.replace(name, data)
        return backend

    def perform(self, request: Request) -> tuple[Response, "Contents"]:
        """What the backend answers, and what it holds then."""
        name, stored = request.name, self.objects.get(request.name)
        match request.kind:
            case "get" | "size" | "read" if stored is None:
                return Response("missing"), self
            case "get":
                return (Response("ok", stored) if len(stored) <= request.length else Response("short")), self  # type: ignore[arg-type]
            case "size":
                return Response("ok", len(stored)), self  # type: ignore[arg-type]
            case "read":
                piece = stored[request.offset : request.offset + request.length]  # type: ignore[index]
                return (Response("ok", piece) if len(piece) == request.length else Response("short")), self
            case "put" | "create" if stored is not None:
                return Response("exists"), self
            case "put" | "create" | "replace":
                return OK, self.with_object(name, request.data)
            case "delete":
                return OK, self.without(name)
            case "list":
                found = sorted((found, len(data)) for found, data in self.objects.items() if found.startswith(name))
                return Response("ok", tuple(found)), self
        raise AssertionError(request.kind)

    def _changed(self, name: str, data: bytes | None) -> "Contents":
        after = self._next.get((name, data))
        if after is None:
            objects = dict(self.objects)
            if data is None:
                del objects[name]
            else:
                objects[name] = data
            after = self._next[name, data] = self._space.contents(objects)
        return after


class Space:
    """All contents that one exploration meets."""

    def __init__(self) -> None:
        self._known: dict[frozenset[tuple[str, bytes]], Contents] = {}

    def contents(self, objects: Mapping[str, bytes]) -> Contents:
        """The one value that holds these objects."""
        key = frozenset(objects.items())
        known = self._known.get(key)
        if known is None:
            log_end = 0
            while log_name(log_end + 1) in objects:
                log_end += 1
            known = self._known[key] = Contents(self, objects, log_end)
        return known

    def of(self, backend: MemoryBackend) -> Contents:
        """What a memory backend holds."""
        return self.contents({info.name: backend.get(info.name, max_bytes=info.size_bytes) for info in backend.list("")})


def log_name(n: int) -> str:
    """Where a log entry lies."""
    return f"log/{n // 1000:017d}/{n:020d}"
