"""Serves the packs in this host's staging folder to the other ranks of a restore, on a thread for each connection.

A stranger, a connection that has not proven yet to know the secret, costs a thread and a file descriptor: there are few at a time. A
reader takes milliseconds for its proof, so the oldest stranger makes room for a new connection, which waits for that in the backlog.
"""

import contextlib
import secrets
import socket
import time
from typing import Final

from tensorstore_ck.backend.staging import StagingFolder
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import Helper
from tensorstore_ck.common.waiting import Changes
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.session.peers.pack_wire import (
    FOUND,
    MAX_RANGE_BYTES,
    NOT_FOUND,
    REQUEST,
    SECRET_BYTES,
    WireError,
    admit_reader,
    receive,
)

PIECE_BYTES: Final = 1 << 20
"""Read and sent at once: it stays in a core's cache between the two."""
MAX_CONNECTIONS: Final = 1024
MAX_STRANGERS: Final = 64
"""Enough for a thousand readers that connect at once, and a quarter of 256 file descriptors."""
STRANGER_SECONDS: Final = 2.0
"""How long a stranger keeps its connection while a new one waits. A reader behind 1024 silent ones waits half of `HELLO_SECONDS`."""
ACCEPT_PAUSE_SECONDS: Final = 0.1
"""The wait after an error of `accept`, which may last: the process has no file descriptor left."""


class PackServer:
    """One rank's server, from its construction to `close`."""

    def __init__(self, folder: StagingFolder) -> None:
        """Listens on all interfaces. Serves only readers that know `secret`.

        Raises:
            OSError: no port is free.
        """
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._folder = folder
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=is_dual)
        self.port: int = self._listener.getsockname()[1]
        self._changes = Changes()
        """Guards the attributes below."""
        self._is_closed = False
        self._connections: dict[socket.socket, Helper] = {}
        self._strangers: dict[socket.socket, float] = {}
        """When each stranger connected; the oldest first."""
        self._accepting = Helper(self._accept, "tsck-packs")
        try:
            self._accepting.start()
        except (RuntimeError, MemoryError) as exc:
            self._listener.close()
            raise OSError(str(exc)) from exc

    def close(self) -> None:
        """Ends all connections."""
        with self._changes.lock:
            self._is_closed = True
            self._changes.notify_all()
            left = dict(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for connection in left:
            _hang_up(connection)
        for helper in (self._accepting, *left.values()):
            helper.end()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                self._changes.wait_for(lambda: self._is_closed, ACCEPT_PAUSE_SECONDS)
                continue
            helper = Helper(lambda connection=connection: self._serve(connection), "tsck-packs")  # type: ignore[misc]
            try:
                self._take(connection, helper)
                helper.start()
            except (RuntimeError, MemoryError):  # the reader reads elsewhere
                self._drop(connection)

    def _take(self, connection: socket.socket, helper: Helper) -> None:
        """Counts a connection as a stranger, once there is room for one.

        Raises:
            RuntimeError: there are too many connections of readers, or the server is closed.
        """
        while not self._changes.wait_for(self._has_room, self._next_expiry_seconds()):
            pass
        with self._changes.lock:
            if self._is_closed or len(self._connections) >= MAX_CONNECTIONS:
                raise RuntimeError("too many connections")
            self._connections[connection] = helper
            self._strangers[connection] = time.monotonic()

    def _has_room(self) -> bool:
        """Whether one more stranger may come, or none ever will; called under the lock. Hangs up on the oldest one if its time is over."""
        if self._is_closed or len(self._strangers) < MAX_STRANGERS:
            return True
        oldest, connected = next(iter(self._strangers.items()))
        if time.monotonic() < connected + STRANGER_SECONDS:
            return False
        del self._strangers[oldest]
        _hang_up(oldest)  # its thread ends, and drops it
        return True

    def _next_expiry_seconds(self) -> float:
        with self._changes.lock:
            return next(iter(self._strangers.values()), 0.0) + STRANGER_SECONDS - time.monotonic()

    def _serve(self, connection: socket.socket) -> None:
        try:
            admit_reader(connection, self.secret)
            with self._changes.lock:
                self._strangers.pop(connection, None)
                self._changes.notify_all()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            piece = memoryview(bytearray(PIECE_BYTES))
            while True:
                pack, offset, size_bytes = REQUEST.unpack(receive(connection, REQUEST.size))
                if size_bytes > MAX_RANGE_BYTES:
                    return
                self._answer(connection, pack_name(Ulid(pack)), range(offset, offset + size_bytes), piece)
        except (OSError, StoreError):
            return  # the reader is gone, or reads what is damaged here elsewhere
        finally:
            self._drop(connection)

    def _answer(self, connection: socket.socket, name: str, wanted: range, piece: memoryview) -> None:
        for start in range(wanted.start, wanted.stop, PIECE_BYTES):
            part = piece[: min(PIECE_BYTES, wanted.stop - start)]
            is_found = self._read(name, start, part)
            if start == wanted.start:
                connection.sendall(FOUND if is_found else NOT_FOUND)
            elif not is_found:
                raise WireError(name)  # it vanished while it was sent
            if not is_found:
                return
            connection.sendall(part)

    def _read(self, name: str, offset: int, target: memoryview) -> bool:
        """Reads the unpublished object, or its copy if it was published meanwhile."""
        try:
            self._folder.unsent.read_into(name, offset, target)
        except StoreError:
            return self._folder.copies.read_into(name, offset, target)
        return True

    def _drop(self, connection: socket.socket) -> None:
        connection.close()
        with self._changes.lock:
            self._connections.pop(connection, None)
            self._strangers.pop(connection, None)
            self._changes.notify_all()


def _hang_up(connection: socket.socket) -> None:
    """Ends what its thread waits for."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
