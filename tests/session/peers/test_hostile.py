"""A process in the gloo group, or at its ports, that is not the rank that it claims to be: it costs a copy, and no wrong byte."""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.session.peers import PeerLink
from tensorstore_ck.session.peers.link import BACK, FORTH, MAC_BYTES, MAX_RECORD_BYTES, PeerLostError
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool
from tests.session.peers.sides import PIECE_BYTES, bytes_of, connected, folder_at, key_of, lies_in, name_of, put_id, side

HOSTS: Final = (0, 1)
SHORT_SECONDS: Final = 1.0
NAME: Final = name_of(0, 1)
"""What the hostile rank offers."""
SIZE: Final = PIECE_BYTES
Attack = Callable[[PeerLink], None]


class _Recorded:
    """A gloo group that keeps each message that is sent, as a listener on the network gets it."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.sent: list[tuple[torch.Tensor, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.sent.append((tensors[0].clone(), rank, tag))
        return self._group.send(tensors, rank, tag)


def _offer(put: int = 1, size: int = SIZE) -> dict[str, Any]:
    return {"txn": put_id(put), "sizes": {NAME: size}, "manifest_bytes": 8}


def _piece(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes(64) + data + bytes(MAC_BYTES), np.uint8).copy()


def _put(link: PeerLink, put: int, data: bytes) -> None:
    """What an honest rank sends."""
    link.send_record(1, FORTH, _offer(put))
    assert link.receive_record(1, BACK)["wanted"] == [NAME]
    for each in (data, b"manifest"):
        link.send(1, FORTH, _piece(each)).wait()
        _take_word(link)


def _take_word(link: PeerLink) -> None:
    link.receive(1, BACK, np.zeros(1 + MAC_BYTES, np.uint8)).wait()


def _other_key(link: PeerLink) -> None:
    link.key = bytes(32)
    link.send_record(1, FORTH, _offer())


def _garbage(link: PeerLink) -> None:
    link.gloo.send([torch.full((8 + MAC_BYTES,), 0xA5, dtype=torch.uint8)], 1, FORTH).wait()


def _oversized_record(link: PeerLink) -> None:
    head = (MAX_RECORD_BYTES + 1).to_bytes(8, "little")
    link.send(1, FORTH, np.frombuffer(head + bytes(MAC_BYTES), np.uint8).copy()).wait()


def _terabytes(link: PeerLink) -> None:
    link.send_record(1, FORTH, _offer(size=1 << 44))
    assert "do not fit" in link.receive_record(1, BACK)["refused"]


def _other_key_in_a_piece(link: PeerLink) -> None:
    link.send_record(1, FORTH, _offer())
    assert link.receive_record(1, BACK)["wanted"] == [NAME]
    key, link.key = link.key, bytes(32)
    link.send(1, FORTH, _piece(bytes(SIZE))).wait()
    link.key = key
    link.send(1, FORTH, _piece(b"manifest")).wait()
    _take_word(link)


def _swapped_pieces(link: PeerLink) -> None:
    """Two pieces of an object, the second one first: as the MACs are, nothing else is wrong."""
    link.send_record(1, FORTH, _offer(size=2 * SIZE))
    link.receive_record(1, BACK)
    group = _Recorded(link.gloo)
    link.gloo = _Silent(group)
    for number in (1, 2):
        link.send(1, FORTH, _piece(bytes([number]) * SIZE))
    for message, _, _ in reversed(link.gloo.sent):
        group.send([message], 1, FORTH).wait()
    _take_word(link)


class _Silent(_Recorded):
    """Keeps what is to be sent, and does not send it."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.sent.append((tensors[0].clone(), rank, tag))


def _stopping_midway(link: PeerLink) -> None:
    link.send_record(1, FORTH, _offer(size=3 * SIZE))
    link.receive_record(1, BACK)
    link.send(1, FORTH, _piece(bytes(SIZE))).wait()


def _short_message(link: PeerLink) -> None:
    """gloo fills what it can, and leaves the rest of the buffer as it was."""
    link.send_record(1, FORTH, _offer())
    link.receive_record(1, BACK)
    for _ in range(2):
        link.gloo.send([torch.zeros(10, dtype=torch.uint8)], 1, FORTH).wait()
    _take_word(link)


_FORGED: Final = "was damaged on the way, or another process sent it"
ATTACKS: Final[dict[Attack, str]] = {
    _other_key: f"a message of rank 0 {_FORGED}",
    _garbage: f"a message of rank 0 {_FORGED}",
    _oversized_record: "rank 0 announced a record of 4194305 bytes",
    _terabytes: "",
    _other_key_in_a_piece: f"{NAME} {_FORGED}",
    _swapped_pieces: f"{NAME} {_FORGED}",
    _stopping_midway: "rank 0 does not answer",
    _short_message: f"{NAME} {_FORGED}",
}
"""What each attack does, and what the other rank says of it."""


def _attacked(base: str, number: int) -> tuple[str, list[str]]:
    if dist.get_rank() == 1:
        return _victim(base, (1,), SHORT_SECONDS if list(ATTACKS)[number] is _stopping_midway else TIMEOUT_SECONDS)
    with suppress(PeerLostError, RuntimeError):  # the other side breaks off
        list(ATTACKS)[number](connected(base, HOSTS)[0])
    dist.barrier(GROUPS[2])
    return "", []


def _victim(base: str, puts: Sequence[int], answer_seconds: float = TIMEOUT_SECONDS) -> tuple[str, list[str]]:
    """Sends nothing, and looks at what comes."""
    own = side(base, HOSTS, 1, answer_seconds=answer_seconds)
    own.replicator._sending._targets = []
    said = ""
    keys: list[str] = []
    try:
        for put in puts:
            keys += own.exchange(put, own.stage((10,)) if put == 1 and not keys else [])
    except BackendUnavailableError as exc:
        said = str(exc)
    dist.barrier(GROUPS[2])
    return "\n".join([*own.warnings, said]), keys


@pytest.mark.parametrize("number", range(len(ATTACKS)), ids=[attack.__name__.lstrip("_") for attack in ATTACKS])
def test_a_hostile_rank_costs_a_copy_and_nothing_of_it_is_kept(pool: Pool, tmp_path: Path, number: int) -> None:
    _, (said, keys) = pool.run(_attacked, str(tmp_path), number, ranks=2)
    assert list(ATTACKS.values())[number] in said
    assert keys == []
    objects, manifests = lies_in(folder_at(tmp_path, 1))
    assert list(manifests) == [key_of(1)]
    assert objects == {name_of(1, 0): bytes_of(name_of(1, 0), 10)}


def _replayed(base: str) -> tuple[str, list[str]]:
    """Rank 0 is honest in the first save; then somebody sends the same again, all of it."""
    if dist.get_rank() == 1:
        return _victim(base, (1, 1))
    link = connected(base, HOSTS)[0]
    group = link.gloo = _Recorded(link.gloo)
    _put(link, 1, b"1" * SIZE)
    with suppress(RuntimeError):  # it is found out
        for message, rank, tag in list(group.sent):
            group.send([message], rank, tag).wait(timedelta(seconds=5))
    dist.barrier(GROUPS[2])
    return "", []


def test_what_was_sent_before_is_not_taken_again(pool: Pool, tmp_path: Path) -> None:
    _, (said, keys) = pool.run(_replayed, str(tmp_path), ranks=2)
    assert "a message of rank 0 was damaged on the way, or another process sent it" in said
    assert keys == [key_of(0)]


def _listening_ports(pid: int) -> list[int]:
    inodes = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{entry}").removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


def _pelted(base: str) -> tuple[list[str], int]:
    """Ranks 0 and 1 keep each other's files; the third process knows their ports only."""
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid(), GROUPS[3])
    if dist.get_rank() < 2:
        own = side(base, HOSTS, 1)
        dist.barrier(GROUPS[3])
        dist.barrier(GROUPS[3])
        return own.exchange(1, own.stage()), 0
    dist.barrier(GROUPS[3])
    told = 0
    for port in [port for pid in pids[:2] for port in _listening_ports(pid)]:
        for data in (b"", b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n" * 50, os.urandom(4096), (1 << 62).to_bytes(8, "little") * 8):
            with socket.socket() as connection:
                connection.settimeout(5)
                try:
                    connection.connect(("127.0.0.1", port))
                    connection.sendall(data)
                    told += 1
                except OSError:
                    continue  # it listens elsewhere, or hung up
    dist.barrier(GROUPS[3])
    return [], told


def test_what_strangers_send_to_the_ports_of_ranks_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    (first, _), (second, _), (_, told) = pool.run(_pelted, str(tmp_path), ranks=3)
    assert told
    assert first == [key_of(1)]
    assert second == [key_of(0)]
