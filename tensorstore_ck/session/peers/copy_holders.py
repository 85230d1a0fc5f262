"""Which ranks keep copies of whose files.

Hosts, in the order of their first ranks, form blocks of one more than the number of copies (the last block takes the rest), and a host's
copies lie on the next hosts of its block, in a ring. So load is even, a rank connects to few others in a job of any size, and only the loss
of a whole block loses files. In one round each rank has one target, and all take the rounds in the same order, so no deadlock is possible.
Pure except `host_of_folder`.
"""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.ids import derived_hash

HOST_BYTES: Final = 16
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def host_of_folder(path: str | os.PathLike[str]) -> bytes:
    """A name that is the same for all processes that share this folder, and for no others: two folders of one machine count as two hosts.

    Raises:
        StoreError: the folder does not exist.
    """
    with os_errors("look at", os.fspath(path)):
        status = os.stat(path)
    machine = _BOOT_ID.read_bytes() if _BOOT_ID.exists() else socket.gethostname().encode()
    return bytes(derived_hash("host of a folder", machine, f"/{status.st_dev}/{status.st_ino}".encode())[:HOST_BYTES])


def copies_possible(hosts: Sequence[bytes], copies: int) -> int:
    """The number of copies that are possible on different other hosts, at most `copies`."""
    return min(copies, len(set(hosts)) - 1)


def block_of(rank: int, hosts: Sequence[bytes], copies: int) -> list[int]:
    """The ranks that keep each other's files, with this one, in order."""
    return sorted(other for host in _position(rank, hosts, copies).ring for other in host)


def targets_of(rank: int, hosts: Sequence[bytes], copies: int) -> list[int]:
    """The ranks that keep copies of this rank's files, one per round, each on another host: the ranks at the same position there.

    Fewer than `copies` if there are not enough `hosts`, of which each rank has one.
    """
    ring, host, place = _position(rank, hosts, copies)
    rounds = range(1, copies_possible(hosts, copies) + 1)
    others = [ring[(host + step) % len(ring)] for step in rounds]
    return [other[place % len(other)] for other in others]


def sources_of(rank: int, hosts: Sequence[bytes], copies: int) -> list[int]:
    """The ranks whose files this rank keeps, round by round."""
    ring, host, place = _position(rank, hosts, copies)
    rounds = range(1, copies_possible(hosts, copies) + 1)
    return [source for step in rounds for source in ring[(host - step) % len(ring)][place :: len(ring[host])]]


class _RingPosition(NamedTuple):
    ring: list[list[int]]
    """The ranks of each host of the block."""
    host: int
    """The number of the rank's host."""
    place: int
    """The rank's position on its host."""


def _position(rank: int, hosts: Sequence[bytes], copies: int) -> _RingPosition:
    ranks: dict[bytes, list[int]] = {}
    for other, host in enumerate(hosts):
        ranks.setdefault(host, []).append(other)
    size = copies + 1
    number = list(ranks).index(hosts[rank])
    block = min(number // size, max(len(ranks) // size - 1, 0))
    is_last = block >= len(ranks) // size - 1
    ring = list(ranks.values())[block * size : None if is_last else (block + 1) * size]
    return _RingPosition(ring, number - block * size, ranks[hosts[rank]].index(rank))
