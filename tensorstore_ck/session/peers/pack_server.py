"""Serves the packs in this host's staging folder to the other ranks of a restore, on a thread for each connection."""

import contextlib
import secrets
import socket
import threading
from typing import Final

from tensorstore_ck.backend.staging import StagingFolder
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import Helper
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.session.peers.pack_wire import FOUND, MAX_RANGE_BYTES, NOT_FOUND, REQUEST, SECRET_BYTES, admit_reader, receive

PIECE_BYTES: Final = 1 << 20
"""Read and sent at once: it stays in a core's cache between the two."""
MAX_CONNECTIONS: Final = 1024


class PackServer:
    """One rank's server, from its construction to `close`."""

    def __init__(self, folder: StagingFolder) -> None:
        """Listens on all interfaces: only who has `secret` is served.

        Raises:
            OSError: no port is free.
        """
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._folder = folder
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=is_dual)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._is_closed = False
        self._connections: dict[socket.socket, Helper] = {}
        self._accepting = Helper(self._accept, "tsck-packs")
        try:
            self._accepting.start()
        except (RuntimeError, MemoryError) as exc:
            self._listener.close()
            raise OSError(str(exc)) from exc

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            self._is_closed = True
            left = dict(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for helper in (self._accepting, *left.values()):
            helper.end()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                continue
            helper = Helper(lambda connection=connection: self._serve(connection), "tsck-packs")  # type: ignore[misc]
            with self._lock:
                is_refused = self._is_closed or len(self._connections) >= MAX_CONNECTIONS
                if not is_refused:
                    self._connections[connection] = helper
            try:
                if is_refused:
                    raise RuntimeError("too many connections")
                helper.start()
            except (RuntimeError, MemoryError):  # the reader reads elsewhere
                self._drop(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            admit_reader(connection, self.secret)
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
                raise WireLostError(name)
            if not is_found:
                return
            connection.sendall(part)

    def _read(self, name: str, offset: int, target: memoryview) -> bool:
        """An object is not published yet, or a copy since."""
        try:
            self._folder.unsent.read_into(name, offset, target)
        except StoreError:
            return self._folder.copies.read_into(name, offset, target)
        return True

    def _drop(self, connection: socket.socket) -> None:
        connection.close()
        with self._lock:
            self._connections.pop(connection, None)


class WireLostError(OSError):
    """An object vanished while it was sent."""
