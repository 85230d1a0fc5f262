"""Process groups that restore together: what `Store` does with ``group=``. Every rank calls the same with its own side of the state."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorstore_ck.address import Resolved
from tensorstore_ck.blockreader import ReadBlocks
from tensorstore_ck.engine import Engine
from tensorstore_ck.envelope import Body, take
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.hostreads import HostReads, host_key
from tensorstore_ck.ids import Digest
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.ranks import DEAD_AFTER_SECONDS, Duties, Group, open_group
from tensorstore_ck.ranks.channel import Runner
from tensorstore_ck.ranks.wording import disagreements

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tensorstore_ck.state import Unclaimed

TIMEOUT_SECONDS = 600.0


class Reading(NamedTuple):
    """How one rank of a group reads."""

    read_blocks: ReadBlocks
    unclaimed: "Unclaimed"
    agree: Callable[[bytes, Callable[[bytes], None]], None]
    """See `state.broadcast.Agree`."""


class Groups:
    """The process groups that one store handle has met."""

    def __init__(self, engine: Engine, dead_after_seconds: float = DEAD_AFTER_SECONDS) -> None:
        self._engine = engine
        self._dead_after_seconds = dead_after_seconds
        self._groups: weakref.WeakKeyDictionary[ProcessGroup, tuple[Group, dict[bytes, int]]] = weakref.WeakKeyDictionary()
        """With the layouts that it has put, and how often: see `run_put`."""
        self._publishing: weakref.WeakKeyDictionary[ProcessGroup, Group] = weakref.WeakKeyDictionary()
        self._told: weakref.WeakKeyDictionary[ProcessGroup, dict[str, list[bytes]]] = weakref.WeakKeyDictionary()

    def tell_all(self, group: "ProcessGroup", title: str, value: Callable[[], bytes], *, timeout_seconds: float) -> list[bytes]:
        """What each rank of a group says, a few bytes; the ranks ask each other once for each `title`."""
        told = self._told.setdefault(group, {})
        if title not in told:
            attempt = self.of(group)[0].begin(title, object_id=title, timeout=timeout_seconds)
            values: list[list[bytes]] = []

            def compare(hellos: list[Body]) -> Body:
                return {"values": [take(hello, "value", bytes) for hello in hellos]}

            def work(go: Body) -> Body:
                values.append(take(go, "values", list))
                return {}

            attempt.run(Duties(lambda: {"value": value()}, work, None, compare, lambda _: {}))
            told[title] = values[0]
        return told[title]

    def from_first(self, group: "ProcessGroup", title: str, value: Callable[[], bytes], *, timeout_seconds: float) -> bytes:
        """What the first rank says, a few bytes, told to all; on the others `value` is not asked."""
        attempt = self.of(group)[0].begin(title, object_id=title, timeout=timeout_seconds)
        told: list[bytes] = []

        def work(go: Body) -> Body:
            told.append(take(go, "value", bytes))
            return {}

        attempt.run(
            Duties(
                lambda: {"title": title}, work, None, lambda hellos: disagreements(hellos, ("title",)) or {"value": value()}, lambda _: {}
            )
        )
        return told[0]

    def runner(self, group: "ProcessGroup") -> Runner:
        """What reaches the store of a group."""
        return self.of(group)[0].run

    def local_ranks(self, group: "ProcessGroup", *, timeout_seconds: float) -> int:
        """How many ranks of a group are on this host, this one among them."""
        hosts = self.tell_all(group, "the count of the ranks of each host", host_key, timeout_seconds=timeout_seconds)
        return hosts.count(hosts[group.rank()])

    def restore(
        self,
        group: "ProcessGroup",
        address: str,
        resolve: Callable[[str], Resolved],
        read: Callable[[SnapshotInfo, "Reading"], Any],
        *,
        timeout_seconds: float,
    ) -> tuple[Any, Resolved]:
        """Restores the snapshot that rank 0 finds at `address` on all ranks, or on none."""
        from tensorstore_ck.state import Unclaimed  # noqa: PLC0415 - loads torch

        result: list[Any] = []
        found: list[Resolved] = []
        unclaimed = Unclaimed()
        own = self.of(group)[0]
        title = f"the checkout of {address!r}"
        attempt = own.begin(title, object_id=address, timeout=timeout_seconds)
        host = HostReads(attempt.txn.hex(), own.rank, timeout=timeout_seconds)

        def compare(hellos: list[Body]) -> Body | str:
            problem = disagreements(hellos, ("address",))
            if problem:
                return problem
            there = resolve(address)
            numbers: dict[bytes, int] = {}
            hosts = [numbers.setdefault(take(hello, "host", bytes) or f"rank {rank}".encode(), rank) for rank, hello in enumerate(hellos)]
            return {
                "snapshot": there.info.ulid,
                "branch": there.branch,
                "branch_root": there.branch_root,
                "hosts": np.array(hosts, "<u4").tobytes(),
            }

        def work(go: Body) -> Body:
            self._engine.log.sync()
            view, ulid = self._engine.log.view(), take(go, "snapshot", bytes)
            info = view.snapshot(ulid) or view.staged(ulid)
            if info is None:
                raise CorruptObjectError(f"this rank does not see the snapshot that rank 0 found at {address!r}", object_id=address)
            branch_root = None if go["branch_root"] is None else Digest(take(go, "branch_root", bytes))
            found.append(Resolved(info, go["branch"], branch_root))
            hosts = np.frombuffer(take(go, "hosts", bytes), "<u4")
            if not self._engine.backend.is_local:  # there the page cache does it, four times as fast
                host.join(np.flatnonzero(hosts == hosts[own.rank]).tolist())
            result.append(read(info, Reading(host.read, unclaimed, partial(self._agree, own, title, timeout_seconds))))
            host.close()  # those that read on must not wait for this rank
            return {"unclaimed": unclaimed.record()}

        def commit(records: list[Body]) -> Body:
            unclaimed.require_claimed([take(record, "unclaimed", bytes) for record in records])
            return {}

        try:
            attempt.run(Duties(lambda: {"address": address, "host": host_key()}, work, None, compare, commit))
        finally:
            host.close()
        return result[0], found[0]

    @staticmethod
    def _agree(group: Group, title: str, timeout: float, bits: bytes, work: Callable[[bytes], None]) -> None:
        """Has all ranks do `work` with the bits that all of them have; or none of them, when it fails on one."""

        def compare(hellos: list[Body]) -> Body | str:
            said = [np.frombuffer(take(hello, "bits", bytes), np.uint8) for hello in hellos]
            if len({len(each) for each in said}) > 1:
                return "the ranks differ in how many tensors they read"
            return {"bits": np.bitwise_and.reduce(said).tobytes()}

        def do(go: Body) -> Body:
            work(take(go, "bits", bytes))
            return {}

        attempt = group.begin(title, object_id=title, timeout=timeout)
        attempt.run(Duties(lambda: {"bits": bits}, do, None, compare, lambda _: {}))

    def close(self) -> None:
        """Ends the threads that talk to the groups' stores; a put or restore after that begins new ones."""
        for group in (*(own for own, _ in self._groups.values()), *self._publishing.values()):
            group.close()
        for known in (self._groups, self._publishing, self._told):
            known.clear()

    def publishing(self, group: "ProcessGroup") -> Group:
        """The same ranks, for what their publishing threads do together, in an order of its own; only after an attempt of `of`."""
        if group not in self._publishing:
            self._publishing[group] = open_group(group, f"{self._engine.config.uuid}/publish", first=self.of(group)[0])
        return self._publishing[group]

    def of(self, group: "ProcessGroup") -> tuple[Group, dict[bytes, int]]:
        """This rank's place in a process group, and the layouts that it has put."""
        if group not in self._groups:
            self._groups[group] = open_group(group, self._engine.config.uuid, dead_after=self._dead_after_seconds), {}
        return self._groups[group]
