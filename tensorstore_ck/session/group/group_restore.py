"""A restore by all ranks of a group: all of them restore the snapshot that rank 0 finds, or none does."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import BackendUnavailableError, MismatchError, StoreError
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.log.address import Resolved
from tensorstore_ck.session.group import Group, Participant
from tensorstore_ck.session.group.host_shared_reads import HostSharedReads, host_key
from tensorstore_ck.session.group.matching_arguments import require_same
from tensorstore_ck.session.group.rank_messages import describe_ranks

if TYPE_CHECKING:
    from tensorstore_ck.log import SnapshotRow

T = TypeVar("T")


class RestoreSources(Protocol):
    """The reads of a staged snapshot from other ranks' disks during a restore. `peers.SharedDisks` is one."""

    def propose(self) -> Body:
        """Returns what this rank can serve."""

    def plan(self, proposals: Sequence[Body], /) -> Body:
        """On rank 0: plans which rank serves what."""

    def begin(self, planned: Body, /) -> None:
        """Starts to read by the plan."""

    def close(self) -> None:
        """Ends serving and reading."""


class GroupReading:
    """How one rank of a group reads."""

    def __init__(self, own: Group, host: HostSharedReads, title: str, timeout_seconds: float) -> None:
        from tensorstore_ck.state import UnclaimedNames  # noqa: PLC0415 - loads torch

        self.read_blocks = host.read
        self.unclaimed = UnclaimedNames()
        self._own = own
        self._title = title
        self._timeout_seconds = timeout_seconds
        self.must_agree = False
        """Whether this rank must still call `agree`, as all ranks do once before the restore ends."""

    def agree(self, bits: bytes, do: Callable[[bytes], None]) -> None:
        """Calls `do` on all ranks, with the bits that all of them have; or on none, if one fails. See `state.broadcast_reads`."""
        self.must_agree = False
        execute = lambda go: do(take(go, "bits", bytes))  # noqa: E731
        self._own.meet(self._title, lambda: {"bits": bits}, self._common_bits, execute, timeout=self._timeout_seconds)

    def fail(self, problem: Exception) -> None:
        """Reports that this rank failed before its `agree`. Without it the other ranks would wait, then be one round ahead."""
        if not self.must_agree:
            return
        with suppress(StoreError):
            attempt = self._own.begin(self._title, object_id=self._title, timeout=self._timeout_seconds)
            attempt.run(Participant.failed(problem, None))

    def _common_bits(self, proposals: list[Body]) -> Body:
        bits_of_ranks = [np.frombuffer(take(proposal, "bits", bytes), np.uint8) for proposal in proposals]
        counts = {rank: f"{8 * len(bits)}" for rank, bits in enumerate(bits_of_ranks)}
        if len(set(counts.values())) > 1:
            what = f"the ranks differ in how many tensors they read, to the next multiple of 8 ({describe_ranks(counts, self._own.in_job)})"
            raise MismatchError(f"{what}: broadcast=True needs the same `into` on all", object_id=self._title)
        return {"bits": np.bitwise_and.reduce(bits_of_ranks).tobytes()}


@dataclass(eq=False, repr=False)
class GroupRestore(Generic[T]):
    """One rank's side of one restore. Every rank calls it with its own side of the state."""

    engine: Engine
    own: Group
    address: str
    find: Callable[[str], Resolved]
    """Called by rank 0, as is `must_agree`."""
    read: "Callable[[SnapshotRow, GroupReading], T]"
    broadcast: bool
    """Must be the same on all ranks."""
    must_agree: "Callable[[SnapshotRow], bool]"
    """Whether `read` calls `GroupReading.agree`."""
    sources: RestoreSources | None
    timeout_seconds: float

    def __post_init__(self) -> None:
        title = f"the checkout of {self.address!r}"
        self._attempt = self.own.begin(title, object_id=self.address, timeout=self.timeout_seconds)
        self._host = HostSharedReads(self._attempt.txn.hex(), self.own.rank, timeout=self.timeout_seconds)
        self._reading = GroupReading(self.own, self._host, title, self.timeout_seconds)
        self._done: list[tuple[T, Resolved]] = []

    def run(self) -> tuple[T, Resolved]:
        """The result of `read`, and the snapshot."""
        try:
            steps = Participant(self._propose, self._execute, None, self._compare, commit=self._require_claimed, begins_rounds=True)
            self._attempt.run(steps)
        finally:
            self._host.close()
            if self.sources is not None:
                self.sources.close()
        return self._done[0]

    def _propose(self) -> Body:
        sources = {} if self.sources is None else self.sources.propose()
        return {"address": self.address, "broadcast": bool(self.broadcast), "host": host_key(), "sources": sources}

    def _compare(self, proposals: list[Body]) -> Body:
        require_same(proposals, ("address", "broadcast"), self.own.in_job)
        resolved = self.find(self.address)
        numbers: dict[bytes, int] = {}
        names = (take(proposal, "host", bytes) or f"rank {rank}".encode() for rank, proposal in enumerate(proposals))
        hosts = [numbers.setdefault(name, rank) for rank, name in enumerate(names)]
        return {
            "snapshot": resolved.info.ulid,
            "branch": resolved.branch,
            "branch_root": resolved.branch_root,
            "hosts": np.array(hosts, "<u4").tobytes(),
            "must_agree": self.must_agree(resolved.info),
            "sources": None if self.sources is None else self.sources.plan([take(proposal, "sources", dict) for proposal in proposals]),
        }

    def _execute(self, go: Body) -> Body:
        self._reading.must_agree = take(go, "must_agree", bool)
        try:
            resolved = self._found(go)
            if self.sources is not None and go["sources"] is not None:
                self.sources.begin(take(go, "sources", dict))
            hosts = np.frombuffer(take(go, "hosts", bytes), "<u4")
            if not self.engine.backend.is_local:  # on local files the page cache does it, four times as fast
                self._host.join(np.flatnonzero(hosts == hosts[self.own.rank]).tolist())
            self._done.append((self.read(resolved.info, self._reading), resolved))
        except Exception as exc:
            self._reading.fail(exc)
            raise
        self._host.close()  # ranks that still read must not wait for this one
        return {"unclaimed": self._reading.unclaimed.record()}

    def _found(self, go: Body) -> Resolved:
        view, ulid = self.engine.log.readable_view(), take(go, "snapshot", bytes)
        info = view.snapshot(ulid) or view.staged(ulid)
        if info is None:
            raise BackendUnavailableError(
                f"this rank does not see the snapshot that rank 0 found at {self.address!r}: do all ranks open one store?",
                object_id=self.address,
            )
        return Resolved(info, go["branch"], None if go["branch_root"] is None else Digest(take(go, "branch_root", bytes)))

    def _require_claimed(self, records: list[Body]) -> Body:
        self._reading.unclaimed.require_claimed([take(record, "unclaimed", bytes) for record in records])
        return {}
