"""How a rank reads ranges of another rank's packs over TCP: the proof that both know the server's secret, then requests and answers.

    server -> reader: nonce (32)
    reader -> server: nonce (32) | MAC of both nonces as reader (32)
    server -> reader: MAC of both nonces as server (32)
    reader -> server: pack (16) | offset (8) | size (4), again and again
    server -> reader: found (1) | the bytes, if found

The bytes are neither encrypted nor signed, as with gloo: a reader verifies each block by its id.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Final

from blake3 import blake3

from tensorstore_ck.common.ids import ULID_BYTES

SECRET_BYTES: Final = 32
NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
REQUEST: Final = struct.Struct(f"<{ULID_BYTES}sQI")
FOUND: Final = b"\x01"
NOT_FOUND: Final = b"\x00"
MAX_RANGE_BYTES: Final = 64 << 20
CONNECT_SECONDS: Final = 10.0
"""How long a connection to one address of a host may take."""
HELLO_SECONDS: Final = 60.0
"""How long the proof may take as a whole: a busy host is not a lost one."""
SILENT_SECONDS: Final = 60.0
"""After this time without a byte the other side is gone."""


class WireError(OSError):
    """The other side is gone or does not know the secret, or what it sends has vanished."""


def receive_into(connection: socket.socket, target: memoryview, go_on: Callable[[], object] = lambda: None) -> None:
    """Fills `target`. `go_on` is called before each wait for bytes.

    Raises:
        OSError: the other side is gone.
    """
    while len(target):
        go_on()
        count = connection.recv_into(target)
        if not count:
            raise WireError("the other side closed the connection")
        target = target[count:]


def receive(connection: socket.socket, size_bytes: int, go_on: Callable[[], object] = lambda: None) -> bytes:
    """The next `size_bytes` bytes; raises as `receive_into`."""
    data = bytearray(size_bytes)
    receive_into(connection, memoryview(data), go_on)
    return bytes(data)


def admit_reader(connection: socket.socket, secret: bytes, monotonic: Callable[[], float] = time.monotonic) -> None:
    """The server's side of the proof.

    Raises:
        OSError: the other side is gone, takes longer than `HELLO_SECONDS`, or does not know the secret.
    """
    in_time = _deadline(connection, monotonic)
    nonce = secrets.token_bytes(NONCE_BYTES)
    in_time()
    connection.sendall(nonce)
    other = receive(connection, NONCE_BYTES, in_time)
    _check(receive(connection, MAC_BYTES, in_time), _proof(secret, b"reader", nonce, other))
    connection.sendall(_proof(secret, b"server", nonce, other))
    connection.settimeout(None)  # a reader may be quiet for as long as it likes


def greet_server(connection: socket.socket, secret: bytes, monotonic: Callable[[], float] = time.monotonic) -> None:
    """The reader's side of the proof; raises as `admit_reader`."""
    in_time = _deadline(connection, monotonic)
    nonce, other = receive(connection, NONCE_BYTES, in_time), secrets.token_bytes(NONCE_BYTES)
    connection.sendall(other + _proof(secret, b"reader", nonce, other))
    _check(receive(connection, MAC_BYTES, in_time), _proof(secret, b"server", nonce, other))
    connection.settimeout(SILENT_SECONDS)


def _deadline(connection: socket.socket, monotonic: Callable[[], float]) -> Callable[[], None]:
    """A function that gives the connection's next call the time that is left of `HELLO_SECONDS`, and raises TimeoutError if none is."""
    end = monotonic() + HELLO_SECONDS

    def in_time() -> None:
        left_seconds = end - monotonic()
        if left_seconds <= 0:
            raise TimeoutError(f"the proof took more than {HELLO_SECONDS:.0f} s")
        connection.settimeout(left_seconds)

    return in_time


def _proof(secret: bytes, role: bytes, nonce: bytes, other: bytes) -> bytes:
    return blake3(role + nonce + other, key=secret).digest()


def _check(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise WireError("the other side does not know the secret")
