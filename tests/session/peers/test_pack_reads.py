"""Reads of another host's packs over TCP: torn at every byte, by who does not know the secret, of what is missing, damaged or moves."""

import errno
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.staging import ReadThroughBackend
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.errors import MissingObjectError
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.session.peers import pack_server, pack_wire
from tensorstore_ck.session.peers.pack_reader import PackReader, ServerAddress
from tensorstore_ck.session.peers.pack_server import PackServer
from tensorstore_ck.session.peers.pack_wire import FOUND, MAC_BYTES, NONCE_BYTES, REQUEST, SECRET_BYTES, admit_reader, greet_server
from tests.effort import PATIENCE_SECONDS
from tests.session.peers.sides import bytes_of, folder_at

PACK: Final = Ulid(bytes(15) + b"\x01")
MISSING: Final = Ulid(bytes(15) + b"\x02")
NAME: Final = pack_name(PACK)
PIECE_BYTES: Final = 64
"""What a server sends at once."""
SIZE: Final = 2 * PIECE_BYTES + 7
DATA: Final = bytes_of(NAME, SIZE)
RANGE: Final = 23
SENT_BYTES: Final = NONCE_BYTES + MAC_BYTES + len(FOUND) + RANGE
"""What a server sends for one read of `RANGE` bytes."""


class TornServer(PackServer):
    """Closes each connection once it has sent so many bytes."""

    left = 0

    def _serve(self, connection: socket.socket) -> None:
        super()._serve(Torn(connection, self.left))  # type: ignore[arg-type]
        self._drop(connection)


class Torn:
    def __init__(self, connection: socket.socket, left: int) -> None:
        self._connection = connection
        self._left = left

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)

    def sendall(self, data: bytes) -> None:
        part = bytes(data)[: self._left]
        self._left -= len(part)
        self._connection.sendall(part)
        if len(part) < len(data):
            raise ConnectionResetError


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PackServer]]:
    """Of two hosts that have the pack."""
    monkeypatch.setattr(pack_server, "PIECE_BYTES", PIECE_BYTES)
    made = []
    for host, kind in enumerate((TornServer, PackServer)):
        folder = folder_at(tmp_path, host)
        folder.unsent.put(NAME, DATA)
        made.append(kind(folder))
    yield made
    for server in made:
        server.close()


def address_of(server: PackServer, secret: bytes | None = None) -> ServerAddress:
    return ServerAddress(("127.0.0.1",), server.port, server.secret if secret is None else secret)


def read(reader: PackReader, offset: int, size_bytes: int, pack: Ulid = PACK) -> bytes | None:
    target = bytearray(size_bytes)
    return bytes(target) if reader.read_into(pack_name(pack), offset, memoryview(target)) else None


def test_ranges_of_all_sizes_and_what_is_missing(servers: list[PackServer]) -> None:
    reader = PackReader({PACK: [address_of(servers[1])], MISSING: [address_of(servers[1])]})
    for offset, size_bytes in [(0, SIZE), (5, PIECE_BYTES), (PIECE_BYTES - 1, 2), (SIZE - 1, 1), (3, 0)]:
        assert read(reader, offset, size_bytes) == DATA[offset : offset + size_bytes]
    assert read(reader, 0, 4, MISSING) is None
    assert read(reader, 0, 4, Ulid(bytes(16))) is None, "nobody was said to have it"
    assert read(reader, 0, RANGE) == DATA[:RANGE], "a missing one costs the others nothing"
    assert read(reader, SIZE - 1, 2) is None, "it ends before"
    reader.close()


def test_a_server_torn_at_every_byte(servers: list[PackServer]) -> None:
    """The next host that has the pack is asked, and gives all of it."""
    for left in range(SENT_BYTES):
        TornServer.left = left
        reader = PackReader({PACK: [address_of(servers[0]), address_of(servers[1])]})
        assert read(reader, 100, RANGE) == DATA[100 : 100 + RANGE], left
        reader.close()
    alone = PackReader({PACK: [address_of(servers[0])]})
    assert read(alone, 100, RANGE) is None
    assert read(alone, 100, RANGE) is None


def test_a_server_that_is_gone(servers: list[PackServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once, whatever it had."""
    gone = address_of(servers[1])
    servers[1].close()
    reader = PackReader({PACK: [gone], MISSING: [gone]})
    tries: list[tuple[str, int]] = []
    connect = socket.create_connection

    def noted(address: tuple[str, int], **options: Any) -> socket.socket:
        tries.append(address)
        return connect(address, **options)

    monkeypatch.setattr(socket, "create_connection", noted)
    assert read(reader, 0, RANGE) is None
    assert read(reader, 0, RANGE, MISSING) is None
    assert len(tries) == 1


@pytest.mark.parametrize("known", [b"", b"\x00" * 32])
def test_who_does_not_know_the_secret_gets_nothing(servers: list[PackServer], known: bytes) -> None:
    """Not even by a proof that the server itself made, sent back to it."""
    with socket.create_connection(("127.0.0.1", servers[1].port)) as connection:
        nonce = connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
        connection.sendall(nonce + nonce + REQUEST.pack(PACK, 0, RANGE))
        with suppress(ConnectionResetError):  # what was sent is not read any more
            assert connection.recv(1) == b""
    if known:
        assert read(PackReader({PACK: [address_of(servers[1], known)]}), 0, RANGE) is None


def stranger_at(server: PackServer) -> socket.socket:
    """A connection that was accepted, and says nothing."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS)
    assert len(connection.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
    return connection


def test_the_oldest_silent_stranger_makes_room_for_a_reader(servers: list[PackServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_wire, "HELLO_SECONDS", 1e4)
    monkeypatch.setattr(pack_server, "MAX_STRANGERS", 2)
    monkeypatch.setattr(pack_server, "STRANGER_SECONDS", 0)
    with stranger_at(servers[1]) as oldest, stranger_at(servers[1]) as newer:
        reader = PackReader({PACK: [address_of(servers[1])]})
        assert read(reader, 0, RANGE) == DATA[:RANGE]
        assert oldest.recv(1) == b""
        with stranger_at(servers[1]):  # the reader is none any more
            newer.setblocking(False)
            with pytest.raises(BlockingIOError):
                newer.recv(1)
            assert read(reader, 1, RANGE) == DATA[1 : 1 + RANGE]
    reader.close()


def test_readers_that_come_at_once_wait_for_each_other(servers: list[PackServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is taken for a stranger that never proves anything. `close` ends the wait."""
    monkeypatch.setattr(pack_wire, "HELLO_SECONDS", 1e4)
    monkeypatch.setattr(pack_server, "MAX_STRANGERS", 1)
    monkeypatch.setattr(pack_server, "STRANGER_SECONDS", 1e4)
    reader = PackReader({PACK: [address_of(servers[1])]})
    all_connect = threading.Barrier(8)

    def restore(offset: int) -> None:
        all_connect.wait(PATIENCE_SECONDS)
        assert read(reader, offset, RANGE) == DATA[offset : offset + RANGE]

    for_each(range(8), restore, 8)
    reader.close()
    with stranger_at(servers[1]) as first, socket.create_connection(("127.0.0.1", servers[1].port), timeout=PATIENCE_SECONDS):
        servers[1].close()
        assert first.recv(1) == b""


def test_an_error_of_accept_is_followed_by_a_pause_that_close_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = threading.Semaphore(0)

    class NoDescriptors(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            tries.release()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    bound = NoDescriptors()
    bound.bind(("127.0.0.1", 0))
    monkeypatch.setattr(pack_server, "ACCEPT_PAUSE_SECONDS", 1e4)
    monkeypatch.setattr(socket, "create_server", lambda *_, **__: bound)
    server = PackServer(folder_at(tmp_path, 0))
    assert tries.acquire(timeout=PATIENCE_SECONDS)
    server.close()
    assert not tries.acquire(blocking=False), "it was tried again at once"


@pytest.mark.parametrize("prove", [admit_reader, greet_server])
def test_a_proof_has_one_deadline_however_often_a_byte_comes(prove: Callable[..., None]) -> None:
    """A byte a second is too slow, though no byte is late."""
    now = itertools.count().__next__

    class Drip(socket.socket):
        def recv_into(self, target: Any, *_: int) -> int:
            return super().recv_into(target[:1])

    ours, other = socket.socketpair()
    with Drip(fileno=ours.detach()) as slow, other:
        other.sendall(bytes(NONCE_BYTES + MAC_BYTES))
        with pytest.raises(TimeoutError, match="60 s"):
            prove(slow, bytes(SECRET_BYTES), now)


def test_what_is_published_meanwhile_is_read_as_a_copy(tmp_path: Path, servers: list[PackServer]) -> None:
    reader = PackReader({PACK: [address_of(servers[1])]})
    assert read(reader, 0, RANGE) == DATA[:RANGE]
    folder_at(tmp_path, 1).publish([NAME])
    assert read(reader, 1, RANGE) == DATA[1 : 1 + RANGE]
    reader.close()


def test_other_hosts_come_before_the_store_and_wrong_bytes_are_asked_for_elsewhere(tmp_path: Path, servers: list[PackServer]) -> None:
    TornServer.left = 1 << 30
    folder_at(tmp_path, 0).unsent.delete([NAME])
    folder_at(tmp_path, 0).unsent.put(NAME, bytes(SIZE))
    store = MemoryBackend()
    backend = ReadThroughBackend(folder_at(tmp_path, 2), store)
    target = memoryview(bytearray(RANGE))
    with pytest.raises(MissingObjectError):
        backend.read_into(NAME, 0, target)
    reader = PackReader({PACK: [address_of(servers[0]), address_of(servers[1])]})
    backend.others.append(reader)
    backend.read_into(NAME, 0, target)
    assert bytes(target) == bytes(RANGE)
    assert backend.distrust(NAME)
    backend.read_into(NAME, 0, target)
    assert bytes(target) == DATA[:RANGE]
    assert not backend.distrust(NAME), "nobody else has it"
    store.put(NAME, DATA[::-1])
    backend.read_into(NAME, 0, target)
    assert bytes(target) == DATA[: -RANGE - 1 : -1]
    reader.close()


def test_a_damaged_file_of_this_host_is_read_from_another_one(tmp_path: Path, servers: list[PackServer]) -> None:
    folder_at(tmp_path, 2).unsent.put(NAME, bytes(SIZE))
    backend = ReadThroughBackend(folder_at(tmp_path, 2), MemoryBackend())
    target = memoryview(bytearray(RANGE))
    assert not backend.distrust(NAME), "nobody else has it"
    reader = PackReader({PACK: [address_of(servers[1])]})
    backend.others.append(reader)
    backend.read_into(NAME, 0, target)
    assert bytes(target) == bytes(RANGE)
    assert backend.distrust(NAME)
    backend.read_into(NAME, 0, target)
    assert bytes(target) == DATA[:RANGE]
    reader.close()


@pytest.mark.parametrize("is_local", [False, True], ids=["the first host's", "this host's"])
def test_threads_that_met_one_wrong_source_give_up_that_one_alone(tmp_path: Path, servers: list[PackServer], is_local: bool) -> None:
    """Each thread reads before either reports the bytes: the second report strikes no host whose bytes nobody has seen."""
    TornServer.left = 1 << 30
    wrong = folder_at(tmp_path, 2 if is_local else 0)
    wrong.unsent.delete([NAME])
    wrong.unsent.put(NAME, bytes(SIZE))
    backend = ReadThroughBackend(folder_at(tmp_path, 2), MemoryBackend())
    addresses = [address_of(server) for server in servers]
    reader = PackReader({PACK: addresses[1:] if is_local else addresses})
    backend.others.append(reader)
    both_read = threading.Barrier(2)
    answers, restored = [], []

    def restore(offset: int) -> None:
        target = memoryview(bytearray(RANGE))
        backend.read_into(NAME, offset, target)
        assert bytes(target) == bytes(RANGE)
        both_read.wait(PATIENCE_SECONDS)
        answers.append(backend.distrust(NAME))
        backend.read_into(NAME, offset, target)
        restored.append(bytes(target) == DATA[offset : offset + RANGE])

    for_each([0, RANGE], restore, 2)
    assert answers == [True, True]
    assert restored == [True, True]
    reader.close()


def test_bytes_of_this_host_are_not_held_against_a_host_that_sent_others(tmp_path: Path, servers: list[PackServer]) -> None:
    """One thread reads one range from another host, then the next one from a wrong copy here."""
    backend = ReadThroughBackend(folder_at(tmp_path, 2), MemoryBackend())
    reader = PackReader({PACK: [address_of(servers[1])]})
    backend.others.append(reader)
    target = memoryview(bytearray(RANGE))
    backend.read_into(NAME, 0, target)
    assert bytes(target) == DATA[:RANGE]
    backend.folder.copies.keep(NAME, bytes(SIZE))
    backend.read_into(NAME, RANGE, target)
    assert bytes(target) == bytes(RANGE)
    assert backend.distrust(NAME)
    backend.read_into(NAME, RANGE, target)
    assert bytes(target) == DATA[RANGE : 2 * RANGE]
    reader.close()
