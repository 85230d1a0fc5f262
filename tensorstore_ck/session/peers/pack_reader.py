"""Reads ranges of packs from the ranks that serve them; a rank that fails is not asked again. Thread-safe."""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.session.peers.pack_wire import CONNECT_SECONDS, FOUND, MAX_RANGE_BYTES, REQUEST, greet_server, receive, receive_into


class ServerAddress(NamedTuple):
    """The address at which a rank serves packs."""

    hosts: tuple[str, ...]
    """Names or addresses of its host, in the order in which they are tried."""
    port: int
    secret: bytes


class PackReader:
    """Connections to the servers of other ranks, kept until `close`."""

    def __init__(self, holders: Mapping[Ulid, Sequence[ServerAddress]]) -> None:
        """`holders`: the servers of each pack, in the order in which they are asked."""
        self._holders = {pack_name(pack): (pack, list(servers)) for pack, servers in holders.items()}
        self._lock = threading.Lock()
        self._idle: dict[ServerAddress, list[socket.socket]] = {}
        self._lost: set[ServerAddress] = set()
        self._is_closed = False

    def read_into(self, name: str, offset: int, target: memoryview) -> Callable[[], None] | None:
        """Fills `target` with bytes of an object, from the first rank that has it.

        Returns the function to call if these bytes are wrong: that rank is not asked for the object again. None if no rank has it.
        """
        while (server := self._server_of(name)) is not None:
            pack = self._holders[name][0]
            starts = range(0, len(target), MAX_RANGE_BYTES)
            if all(self._read(server, pack, offset + start, target[start : start + MAX_RANGE_BYTES]) for start in starts):
                return partial(self._strike, name, server)
            self._strike(name, server)
        return None

    def has(self, name: str) -> bool:
        """Whether any rank that is not lost should have the object."""
        return self._server_of(name) is not None

    def close(self) -> None:
        """Closes all connections."""
        with self._lock:
            self._is_closed = True
            left = [connection for idle in self._idle.values() for connection in idle]
            self._idle.clear()
        for connection in left:
            connection.close()

    def _server_of(self, name: str) -> ServerAddress | None:
        with self._lock:
            servers = self._holders.get(name, (None, ()))[1]
            return next((server for server in servers if server not in self._lost), None)

    def _strike(self, name: str, server: ServerAddress) -> None:
        with self._lock:
            servers = self._holders[name][1]
            if server in servers:
                servers.remove(server)

    def _read(self, server: ServerAddress, pack: Ulid, offset: int, target: memoryview) -> bool:
        connection: socket.socket | None = None
        try:
            connection = self._connection_to(server)
            connection.sendall(REQUEST.pack(pack, offset, len(target)))
            is_found = receive(connection, len(FOUND)) == FOUND
            if is_found:
                receive_into(connection, target)
        except OSError:
            with self._lock:
                self._lost.add(server)
            if connection is not None:
                connection.close()
            return False
        self._give_back(server, connection)
        return is_found

    def _connection_to(self, server: ServerAddress) -> socket.socket:
        with self._lock:
            idle = self._idle.get(server)
            if idle:
                return idle.pop()
        problem: OSError | None = None
        for host in server.hosts:
            try:
                return _connected(host, server)
            except OSError as exc:
                problem = exc
        raise problem or OSError("a server without an address")

    def _give_back(self, server: ServerAddress, connection: socket.socket) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.setdefault(server, []).append(connection)
                return
        connection.close()


def _connected(host: str, server: ServerAddress) -> socket.socket:
    connection = socket.create_connection((host, server.port), timeout=CONNECT_SECONDS)
    try:
        greet_server(connection, server.secret)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        connection.close()
        raise
    return connection
