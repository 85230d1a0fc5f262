"""A backend in memory that counts what it is asked. The bytes of `Faked` blocks have sizes only: packs keep all others."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Created, ObjectInfo, ObjectWriter
from tensorstore_ck.backend.s3_multipart_writer import PIECE_BYTES
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.ids import Digest, Ulid

LIST_PAGE: Final = 1000
WINDOW_BYTES: Final = 16 << 20
"""What a write to a file takes."""


class Faked:
    """Stands for the bytes of one block where a buffer is expected."""

    def __init__(self, size_bytes: int, id: Digest) -> None:  # noqa: A002 - as everywhere
        self._size_bytes = size_bytes
        self.id = id

    def __len__(self) -> int:
        return self._size_bytes

    def __bytes__(self) -> bytes:
        return bytes(self._size_bytes)

    def __getitem__(self, part: slice) -> bytes:
        """A sample: zeros."""
        return bytes(len(range(*part.indices(self._size_bytes))))


class Request(NamedTuple):
    """One request."""

    kind: str
    """``get``, ``read``, ``head``, ``put``, ``create``, ``write``, ``list``, ``delete``."""
    name: str
    size_bytes: int
    offset: int = 0
    """Of a ``read``."""


class Traffic(list[Request]):
    """Requests, in order."""

    def bytes_of(self, *kinds: str) -> int:
        """What the requests of these kinds carried."""
        return sum(request.size_bytes for request in self if request.kind in kinds)


class SparsePack(NamedTuple):
    """A pack, of which only some pieces have bytes."""

    size_bytes: int
    pieces: tuple[tuple[int, bytes], ...]


class CountingBackend(MemoryBackend):
    """See the module."""

    def __init__(self, *, is_local: bool = True) -> None:
        super().__init__()
        self.is_local = is_local
        self.traffic = Traffic()
        self.packs: dict[str, SparsePack] = {}
        self.packs_named: list[Ulid] = []
        """For callers that make up parts."""
        self._count_lock = threading.Lock()

    def count(self, kind: str, name: str, size_bytes: int = 0, offset: int = 0) -> None:
        with self._count_lock:
            self.traffic.append(Request(kind, name, size_bytes, offset))

    def take_traffic(self) -> Traffic:
        """All requests since the last call."""
        with self._count_lock:
            taken, self.traffic = self.traffic, Traffic()
        return taken

    def get(self, name: str, *, max_bytes: int) -> bytes:
        data = b""
        try:
            data = super().get(name, max_bytes=max_bytes)
        finally:
            self.count("get", name, len(data))
        return data

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self.count("read", name, len(target), offset)
        if name not in self.packs:
            super().read_into(name, offset, target)
            return
        for start, data in self.packs[name].pieces:
            first, last = max(start, offset), min(start + len(data), offset + len(target))
            if first < last:
                target[first - offset : last - offset] = data[first - start : last - start]

    def size(self, name: str) -> int:
        self.count("head", name)
        return self.packs[name].size_bytes if name in self.packs else super().size(name)

    def put(self, name: str, data: Buffer) -> None:
        self.count("put", name, len(data))
        super().put(name, data)

    def create(self, name: str, data: Buffer) -> Created:
        self.count("create", name, len(data))
        return super().create(name, data)

    def open_writer(self, name: str) -> ObjectWriter:
        return _SparseWriter(self, name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = [ObjectInfo(name, pack.size_bytes, 0) for name, pack in self.packs.items() if name.startswith(prefix)]
        found += super().list(prefix)
        for _ in range(0, max(len(found), 1), LIST_PAGE):
            self.count("list", prefix)
        yield from found

    def delete(self, names: Iterable[str]) -> None:
        left = iter(names)
        while several := list(islice(left, 1 if self.is_local else LIST_PAGE)):
            self.count("delete", several[0])
            for name in several:
                self.packs.pop(name, None)
            super().delete(several)


class _SparseWriter:
    """Counts the bytes of one pack in requests: an upload's pieces, or a file's creation and its windows."""

    def __init__(self, backend: CountingBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._size = 0
        self._pieces: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()

    def append(self, data: Sequence[Buffer]) -> int:
        with self._lock:
            offset = self._size
            for piece in data:
                if not isinstance(piece, Faked):
                    self._pieces.append((self._size, bytes(piece)))
                self._size += len(piece)
        return offset

    def close(self) -> None:
        backend, name = self._backend, self._name
        is_upload = not backend.is_local and self._size > PIECE_BYTES
        if backend.is_local or is_upload:
            backend.count("create", name)  # of the file or the upload
        piece_bytes = WINDOW_BYTES if backend.is_local else PIECE_BYTES
        for start in range(0, self._size, piece_bytes):
            backend.count("write", name, min(piece_bytes, self._size - start))
        if is_upload:
            backend.count("create", name)  # of the object
        backend.packs[name] = SparsePack(self._size, tuple(self._pieces))

    def abort(self) -> None:
        """Nothing was kept."""
