"""What a hostile rank sends as a record. An input is a body: sent as it is, and by one who has the key, with its length and MACs."""

from contextlib import suppress
from typing import Any

import atheris
from _common import fuzz, mutate_body

with atheris.instrument_imports(include=["tensorstore_ck"]):
    import torch  # noqa: F401 - a link loads it, which takes longer than an input may

    from tensorstore_ck.session.peers.link import PeerLink, PeerLostError, message_mac

KEY = bytes(32)


class Hostile:
    """Gloo, of which all that is received is one stream of bytes."""

    def __init__(self, stream: bytes) -> None:
        self.stream = stream

    def recv(self, tensors: list[Any], peer: int, tag: int) -> "Hostile":
        (tensor,) = tensors
        if len(self.stream) < tensor.numel():
            raise RuntimeError("the connection was closed")
        tensor.numpy()[:] = list(self.stream[: tensor.numel()])
        self.stream = self.stream[tensor.numel() :]
        return self

    def wait(self, timeout: object) -> None:
        """It is there."""


def target(data: bytes) -> None:
    pieces = enumerate((len(data).to_bytes(8, "little"), data), 1)
    signed = b"".join(piece + message_mac(KEY, (1, 0, 0, number), memoryview(piece)) for number, piece in pieces)
    for stream in (data, signed):
        with suppress(PeerLostError):
            assert type(PeerLink(Hostile(stream), (0, 1), 0, KEY, 1.0).receive_record(1, 0)) is dict


if __name__ == "__main__":
    fuzz("peer", target, mutate_body)
