"""Restores snapshots: the bodies of `Store.checkout`, `rank_state`, `streams`, `finish_staged`, in one process or by all ranks of a group.

With ``group=`` everything is read within one attempt of the ranks (`GroupRestore`): an error on one rank ends the restore on all at once.
torch is imported only by what takes or returns tensors.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, Unpack

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import raise_if_expired
from tensorstore_ck.engine.read.snapshot_reader import MergedSnapshot, SnapshotReader, open_snapshot, require_part_of_each_rank
from tensorstore_ck.errors import DamageError, MismatchError, NotFoundError, StoreError
from tensorstore_ck.format.part import part_name
from tensorstore_ck.format.random_streams import RULE, Streams
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.address import Resolved, is_staged_address, resolve
from tensorstore_ck.log.snapshot import Snapshot, refuse_marked
from tensorstore_ck.session.group.group_restore import GroupReading, GroupRestore
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS, process_group
from tensorstore_ck.session.session import Session

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tensorstore_ck.state import LazySnapshot, LoadReport

_logger: Final = logging.getLogger("tensorstore_ck.session")

T = TypeVar("T")

SHARED_PARTS: Final = 32
"""The ranks of a restore share the parts of a snapshot that has at least this number. Reading fewer costs less than the agreement."""


class RestoreArguments(TypedDict, total=False):
    """How a state is restored: see `Store.checkout`."""

    into: object
    select: Sequence[str] | None
    strict: bool
    rename: Mapping[str, str] | Callable[[str], str | None] | None
    dtype: "torch.dtype | None"
    device: "str | torch.device"
    report: "LoadReport | None"


@dataclass
class Restoring:
    """One rank's view of a snapshot that is being restored."""

    engine: Engine
    info: SnapshotRow
    group: "ProcessGroup | None" = None
    reading: GroupReading | None = None
    """How this rank reads together with the others of `group`."""

    _opened: SnapshotReader | MergedSnapshot | None = None

    @property
    def _position(self) -> float:
        return 0.0 if self.group is None else (self.group.rank() + 0.5) / self.group.size()

    def _content(self) -> SnapshotReader | MergedSnapshot:
        """Opened once: reading the tables of a large state takes as long as reading a small state's tensors."""
        if self._opened is None:  # no `cached_property`: in Python 3.11 it holds one lock for all instances while it reads the store
            self._opened = open_snapshot(self.engine, self.info, position=self._position)
        return self._opened

    def lazy(self, require_open: Callable[[], object] = lambda: None) -> "LazySnapshot":
        """The snapshot, without reading tensors. `require_open` raises if the store was closed."""
        from tensorstore_ck.state import LazySnapshot  # noqa: PLC0415 - loads torch

        return LazySnapshot(self._content(), require_open)

    def metadata(self) -> dict[str, Any]:
        """As `Store.metadata`."""
        return self.engine.read_metadata(self.info)

    def checkout(self, *, broadcast: bool = False, **how: Unpack[RestoreArguments]) -> Any:
        """See `Store.checkout`. Called once only, as the ranks of a host read together."""
        from tensorstore_ck.state import restore  # noqa: PLC0415 - loads torch

        group, reading = self.group, self.reading
        if group is None or reading is None:
            return restore(self._content(), **how)
        together = partial(restore, group=group, unclaimed=reading.unclaimed, **how)
        if broadcast:
            from tensorstore_ck.state.broadcast_reads import BroadcastContent  # noqa: PLC0415 - loads torch.distributed

            return together(BroadcastContent(self._content().reading_with(reading.read_blocks), group, reading.agree))
        if not reading.must_agree:
            return together(self._content().reading_with(reading.read_blocks))
        from tensorstore_ck.state.shared_parts import PartSharingContent, SharedParts  # noqa: PLC0415 - loads torch.distributed

        parts = SharedParts(self.engine, self.info, group, reading.agree)
        content = open_snapshot(self.engine, self.info, reading.read_blocks, position=self._position, read_part=parts.read)
        return together(PartSharingContent(content, parts))

    def finish(self) -> None:
        """Takes part in the last step of all ranks, if this rank has read nothing together with the others."""
        if self.group is not None and self.reading is not None and self.reading.must_agree:
            from tensorstore_ck.state.shared_parts import SharedParts  # noqa: PLC0415 - loads torch.distributed

            SharedParts(self.engine, self.info, self.group, self.reading.agree).take_part()

    def selected(self, *globs: str) -> Any:
        """The part of the state that fits the globs, read by this rank alone."""
        from tensorstore_ck.state import restore  # noqa: PLC0415 - loads torch

        return restore(self._content(), select=globs)

    def rank_state(self, rank: int) -> Any:
        """The state that a rank saved as its own.

        Raises:
            NotFoundError: no rank states were saved, or there is no such rank.
        """
        from tensorstore_ck.state import restore  # noqa: PLC0415 - loads torch

        return restore(open_rank_state(self.engine, self.info, rank))

    def streams(self) -> Streams:
        """See `Store.streams`."""
        rank, ranks = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        return Streams(self.info.root.hex(), rank, ranks, self.engine.read_record(self.info).streams or RULE)


def checkout(
    session: Session,
    address: str,
    *,
    group: "ProcessGroup | DeviceMesh | None",
    allow_marked: bool,
    timeout_seconds: float,
    broadcast: bool,
    **how: Unpack[RestoreArguments],
) -> Any:
    """See `Store.checkout`."""
    return restoring(
        session,
        address,
        lambda found: found.checkout(broadcast=broadcast, **how),
        group=group,
        broadcast=broadcast,
        allow_marked=allow_marked,
        timeout_seconds=timeout_seconds,
    )[0]


def restoring(
    session: Session,
    address: str,
    read: Callable[[Restoring], T],
    *,
    group: "ProcessGroup | DeviceMesh | None" = None,
    broadcast: bool = False,
    allow_marked: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> tuple[T, SnapshotRow]:
    """See `Store.restoring`."""
    ranks = None if group is None else process_group(group)
    finish_staged(session, address, ranks, timeout_seconds)
    session.context.forget_frozen()  # a restore may fill them

    def find(address: str) -> Resolved:
        resolved = session.engine.resolve(address)
        _logger.debug("%s is step %s of %s, root %s", address, resolved.info.step, resolved.info.ref, resolved.info.root.hex())
        if resolved.info.mark and not allow_marked:
            refuse_marked(Snapshot.from_info(resolved.info), address, "pass allow_marked=True")
        return resolved

    def must_agree(info: SnapshotRow) -> bool:
        return broadcast or len(session.engine.recent_record(info).parts) >= SHARED_PARTS

    try:
        result, resolved = _read_together(
            session,
            address=address,
            find=find,
            read=read,
            group=ranks,
            broadcast=broadcast,
            must_agree=must_agree,
            timeout_seconds=timeout_seconds,
        )
    finally:
        session.context.forget_frozen()  # what a save of another thread read meanwhile
    session.fence.note_restored(resolved)
    return result, resolved.info


def finish_staged(session: Session, address: str, ranks: "ProcessGroup | None", timeout_seconds: float) -> None:
    """See `Store.finish_staged`."""
    if ranks is not None:
        session.resume_ranks(ranks, timeout_seconds)
    session.queue.wait_idle(uploads=session.engine.tier is None or not _is_staged(session.engine, address))


def _is_staged(engine: Engine, address: str) -> bool:
    """Whether the address means a snapshot that is staged and not published yet."""
    if is_staged_address(address):
        return True
    try:
        view = engine.log.view()
        return view.staged(resolve(view, address).info.ulid) is not None
    except StoreError:
        return False


def rank_state(
    session: Session,
    address: str,
    rank: int | None,
    *,
    rank_state_map: Callable[[int, int], int | Iterable[int]] | None,
    group: "ProcessGroup | DeviceMesh | None",
    timeout_seconds: float,
) -> Any:
    """See `Store.rank_state`."""
    ranks = process_group(group)
    own, size = (0, 1) if ranks is None else (ranks.rank(), ranks.size())

    def read(restored: Restoring) -> Any:
        stored = count_rank_states(restored.engine, restored.info, size if rank is None and rank_state_map is None else None)
        if rank is not None:
            return restored.rank_state(rank)
        whose = own if rank_state_map is None or stored == size else rank_state_map(own, stored)
        return [restored.rank_state(wanted) for wanted in whose] if isinstance(whose, Iterable) else restored.rank_state(whose)

    return _read_together(session, address=address, find=session.engine.resolve, read=read, group=ranks, timeout_seconds=timeout_seconds)[0]


def streams(session: Session, address: str, *, group: "ProcessGroup | DeviceMesh | None", timeout_seconds: float) -> Streams:
    """See `Store.streams`."""
    ranks = process_group(group)
    return _read_together(
        session, address=address, find=session.engine.resolve, read=Restoring.streams, group=ranks, timeout_seconds=timeout_seconds
    )[0]


def _read_together(
    session: Session,
    address: str,
    find: Callable[[str], Resolved],
    read: Callable[[Restoring], T],
    group: "ProcessGroup | None",
    *,
    broadcast: bool = False,
    must_agree: Callable[[SnapshotRow], bool] = lambda _: False,
    timeout_seconds: float,
) -> tuple[T, Resolved]:
    """Returns the result of `read` for the snapshot at `address`, and that snapshot. With `group` it is the same snapshot on all ranks, and
    either all ranks succeed or none.

    `broadcast`, `must_agree`: see `GroupRestore`.
    """
    engine = session.engine
    if group is None:
        resolved = find(address)
        return read(Restoring(engine, resolved.info)), resolved

    engine.reads.share(group.size())

    def read_as_rank(info: SnapshotRow, reading: GroupReading) -> T:
        restoring = Restoring(engine, info, group, reading)
        result = read(restoring)
        restoring.finish()
        return result

    sources = None
    if engine.tier is not None and is_staged_address(address):
        from tensorstore_ck.session.peers import SharedDisks  # noqa: PLC0415 - loads torch

        sources = SharedDisks(engine.tier, group.rank())
    return GroupRestore(
        engine=engine,
        own=session.groups.of(group)[0],
        address=address,
        find=find,
        read=read_as_rank,
        broadcast=broadcast,
        must_agree=must_agree,
        sources=sources,
        timeout_seconds=timeout_seconds,
    ).run()


def count_rank_states(engine: Engine, info: SnapshotRow, world_size: int | None = None) -> int:
    """How many ranks saved a state of their own.

    Raises:
        NotFoundError: none.
        MismatchError: their number is not `world_size`.
    """
    record = engine.read_record(info)
    try:
        ranks = engine.read_part(record, 0).world_size  # its layout, which may be large, is not needed
    except DamageError as exc:
        raise_if_expired(engine.log, info, exc)
        raise
    require_part_of_each_rank(record, ranks, part_name(record.parts[0]))
    what = f"snapshot {info.root.hex()[:16]} (step {info.step})"
    if len(record.parts) == ranks:
        raise NotFoundError(f"{what} has no rank states: it was saved without rank_state=", object_id=info.root.hex())
    if world_size not in (None, ranks):
        raise MismatchError(
            f"{what} has the states of {ranks} ranks, and there are {world_size} now. Say whose each takes with rank_state_map=, seed "
            "new random streams with store.random_streams(), and keep a loader's position as a SampleCursor in the shared state",
            object_id=info.root.hex(),
        )
    return ranks


def open_rank_state(engine: Engine, info: SnapshotRow, rank: int) -> SnapshotReader:
    """The state that a rank saved as its own.

    Raises:
        NotFoundError: no rank states were saved, or there is no such rank.
    """
    ranks = count_rank_states(engine, info)
    if not 0 <= rank < ranks:
        what = f"snapshot {info.root.hex()[:16]} (step {info.step})"
        raise NotFoundError(f"{what} has the states of {ranks} ranks, and there is no rank {rank}", object_id=str(rank))
    return SnapshotReader(engine, info, ranks + rank)
