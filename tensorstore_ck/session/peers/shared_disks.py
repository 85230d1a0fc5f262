"""Reads a staged snapshot from the staging disks of several hosts: each rank serves packs of its own disk, and reads the others.

So a staged snapshot can be restored by other ranks than those that staged it, before it is in the store. Each pack is served by one rank of
each host that has it. Rank 0 collects who has what: about 100 bytes for each rank, and 20 for each pack and host.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress

from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.common.ids import ULID_BYTES, Ulid, parse_ulid, split_ulids
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.session.peers.copy_holders import host_of_folder
from tensorstore_ck.session.peers.pack_reader import PackReader, ServerAddress
from tensorstore_ck.session.peers.pack_server import PackServer

DISCARD_PORT = 9


class SharedDisks:
    """One rank's side in one restore: `propose`, on rank 0 `plan`, `begin`, and in any case `close`. See `RestoreSources`."""

    def __init__(self, tier: StagingTier, rank: int) -> None:
        self._tier = tier
        self._rank = rank
        self._server: PackServer | None = None
        self._reader: PackReader | None = None

    def propose(self) -> Body:
        """Begins to serve this rank's packs; returns what it can serve."""
        folder = self._tier.folder
        try:
            names = [info.name for info in folder.unsent.list("packs/")]
            packs = [ulid for name in names if (ulid := parse_ulid(name.rpartition("/")[2])) is not None]
            self._server = PackServer(folder)
            host = host_of_folder(folder.path)
        except (OSError, StoreError):  # the others read without this rank
            return {}
        return {"host": host, "packs": b"".join(sorted(packs)), "server": [list(own_addresses()), self._server.port, self._server.secret]}

    @staticmethod
    def plan(proposals: Sequence[Body]) -> Body:
        """On rank 0: which rank serves which packs."""
        on_host: dict[bytes, list[int]] = {}
        for rank, proposal in enumerate(proposals):
            if proposal:
                on_host.setdefault(take(proposal, "host", bytes), []).append(rank)
        served: dict[int, list[bytes]] = {}
        for ranks in on_host.values():
            packs = {pack for rank in ranks for pack in split_ulids(take(proposals[rank], "packs", bytes))}
            for number, pack in enumerate(sorted(packs)):
                served.setdefault(ranks[number % len(ranks)], []).append(pack)
        return {"servers": [[rank, proposals[rank]["server"], b"".join(packs)] for rank, packs in sorted(served.items())]}

    def begin(self, planned: Body) -> None:
        """From now on, reads packs from the hosts that have them, first from the nearest rank above this one."""
        holders: dict[Ulid, list[ServerAddress]] = {}
        servers = take(planned, "servers", list)
        for rank, (hosts, port, secret), packs in sorted(servers, key=lambda server: server[0] < self._rank):
            if rank == self._rank or len(packs) % ULID_BYTES:
                continue
            for pack in split_ulids(packs):
                holders.setdefault(pack, []).append(ServerAddress(tuple(hosts), port, secret))
        self._reader = PackReader(holders)
        self._tier.backend.others.append(self._reader)

    def close(self) -> None:
        """Ends serving and reading: all ranks have restored, or none will."""
        if self._reader is not None:
            self._tier.backend.others.remove(self._reader)
            self._reader.close()
        if self._server is not None:
            self._server.close()


def own_addresses() -> Iterator[str]:
    """Addresses of this host that another one may reach, the likeliest first: on the way to the job's first host, by name, and itself."""
    seen: dict[str, None] = {}
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", ""), DISCARD_PORT))  # sends nothing
        seen[str(probe.getsockname()[0])] = None
    with suppress(OSError):
        seen |= {str(found[4][0]): None for found in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)}
    yield from seen
    yield "127.0.0.1"
