"""Which ranks keep copies of whose files: hosts stand in a ring, in the order of their first ranks, and the next ones keep them.

Pure but for `host_of_folder`. In one round each rank has one target and what it is sent comes from one host, so that rounds, taken in
the same order by all, cannot wait for each other in a circle.
"""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tensorstore_ck.backend.oserrors import os_errors
from tensorstore_ck.ids import derived_hash

HOST_BYTES: Final = 16
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def host_of_folder(path: str | os.PathLike[str]) -> bytes:
    """The same for all processes that share this folder, and for no others: two folders of one machine count as two hosts.

    Raises:
        StoreError: the folder is not there.
    """
    with os_errors("look at", os.fspath(path)):
        place = os.stat(path)
    machine = _BOOT_ID.read_bytes() if _BOOT_ID.exists() else socket.gethostname().encode()
    return bytes(derived_hash("host of a folder", machine, f"/{place.st_dev}/{place.st_ino}".encode())[:HOST_BYTES])


def copies_possible(hosts: Sequence[bytes], copies: int) -> int:
    """How many copies on different other hosts there can be, at the most as many as asked for."""
    return min(copies, len(set(hosts)) - 1)


def targets_of(rank: int, hosts: Sequence[bytes], copies: int) -> list[int]:
    """The ranks that keep copies of this rank's files, one per round, each on another host: those at its own position on theirs.

    Args:
        rank: Whose files.
        hosts: The host of each rank.
        copies: How many; fewer if there are not enough hosts.
    """
    ring = _ring(hosts)
    host, place = _seat(rank, ring)
    rounds = range(1, copies_possible(hosts, copies) + 1)
    others = [ring[(host + step) % len(ring)] for step in rounds]
    return [other[place % len(other)] for other in others]


def sources_of(rank: int, hosts: Sequence[bytes], copies: int) -> list[int]:
    """The ranks whose files this rank keeps, round by round."""
    ring = _ring(hosts)
    host, place = _seat(rank, ring)
    rounds = range(1, copies_possible(hosts, copies) + 1)
    return [source for step in rounds for source in ring[(host - step) % len(ring)][place :: len(ring[host])]]


def _ring(hosts: Sequence[bytes]) -> list[list[int]]:
    """The ranks of each host."""
    ranks: dict[bytes, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return list(ranks.values())


def _seat(rank: int, ring: list[list[int]]) -> tuple[int, int]:
    """The number of a rank's host, and its position there."""
    return next((number, ranks.index(rank)) for number, ranks in enumerate(ring) if rank in ranks)
