"""`Feed`: keeps tensors at the newest snapshot of a branch. Writes nothing to the store."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Self

import torch

from tensorstore_ck.common.host_memory import memory_errors, require_memory
from tensorstore_ck.common.ids import Clock, Digest
from tensorstore_ck.common.threads import cpu_threads, for_each, shielded
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.read.snapshot_reader import Layouts, open_snapshot
from tensorstore_ck.errors import BackendUnavailableError, BrokenLogError, InputError, InvalidOptionError, SnapshotExpiredError
from tensorstore_ck.events import Event, Kind
from tensorstore_ck.feed.followed_tensor import Change, FollowedTensor
from tensorstore_ck.feed.held_blocks import HeldBlocks, Place, place_of
from tensorstore_ck.feed.host_cache import HostCache
from tensorstore_ck.feed.match_tensors import Wanted, match_tensors
from tensorstore_ck.feed.read_changes import ChangesReader
from tensorstore_ck.log import RefTable, SnapshotRow
from tensorstore_ck.log.snapshot import Snapshot, refuse_marked

POLL_SECONDS: Final = 1.0
LOOKS_A_POLL: Final = 10
"""A `wait` that found nothing asks for the next log entry alone, until as many looks; then it also sees whether the log went back."""
LAYOUTS_BYTES: Final = 16 << 20
"""Of layouts that are kept, at most, unless one is larger."""


@dataclass(frozen=True, slots=True)
class FeedVersion:
    """A snapshot that a feed staged, or that its tensors are."""

    root: str
    """As in `Snapshot`; so are `step` and `time_ns`."""
    step: int | None
    time_ns: int
    clock: Clock = field(default=time.time_ns, repr=False, compare=False)

    @property
    def age_seconds(self) -> float:
        """Since it was made, by the clocks of this host and of the one that saved it."""
        return (self.clock() - self.time_ns) / 1e9


class _Staged(NamedTuple):
    """A version, and what makes the tensors that version."""

    version: FeedVersion
    tensors: Sequence[FollowedTensor]
    changes: Sequence[Change]
    ids: dict[Place, Digest]
    seconds: float
    """How long it took to stage."""


@short_errors
class Feed:
    """Keeps tensors at the newest snapshot of a branch: see `Store.follow`. Thread-safe.

    `poll` reads and verifies a new version, and stages what it changes in host memory; `swap` copies that into the tensors. Whatever
    fails, the tensors are one version, and `version` says which.
    """

    def __init__(
        self,
        engine: Engine,
        ref: str,
        wanted: Wanted,
        *,
        on_change: Callable[[], object],
        poll_seconds: float = POLL_SECONDS,
        host_cache: str | None = None,
    ) -> None:
        """See `Store.follow`. `on_change` is called when a swap has changed tensors, or has undone that."""
        if not poll_seconds > 0:
            raise InvalidOptionError(f"poll_seconds must be above 0, not {poll_seconds}", object_id="poll_seconds")
        if host_cache is not None and not engine.backend.is_local:
            cache = HostCache(engine.backend, host_cache)
            engine = replace(engine, backend=cache, forget_copies=cache.distrust)
        self._engine, self._ref, self._wanted, self._poll_seconds = engine, ref, wanted, poll_seconds
        self._on_change = on_change
        self._polling = threading.Lock()
        """One thread at a time looks for a version."""
        self._lock = threading.Lock()
        """Held while tensors change."""
        self._is_staging = False
        self._closed = Flag()
        self._staged: _Staged | None = None
        self._ids: dict[Place, Digest] = {}
        """The blocks of `version`."""
        self._layouts = Layouts(lambda: LAYOUTS_BYTES, len)
        """Versions mostly have the same one."""
        self._version: FeedVersion | None = None
        self._idle_at: int | None = None
        """The log entry at which the last poll found the branch at `version`; None if it did not."""
        self._events: deque[Event] = deque()
        """Not delivered yet: callbacks run without the locks, so that they may call this feed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops what is staged, and ends a `wait` of another thread. The tensors stay as they are."""
        self._closed.set()
        with self._polling, self._lock:
            self._staged = None

    @property
    def version(self) -> FeedVersion | None:
        """The version that the tensors are; None before the first swap."""
        return self._version

    def poll(self, address: str | None = None, *, verify: bool = False) -> FeedVersion | None:
        """Stages the newest version of the branch; returns it, or None if the tensors are that version.

        After a reset or a rollback of the branch that is an older snapshot. Reads what differs from the tensors, and verifies all of it.
        The tensors must not change until `swap`.

        Args:
            address: Another snapshot to stage, such as the root that several processes have agreed on.
            verify: Hash all tensors first, and stage also what somebody changed in them since the last swap.

        Raises:
            NotFoundError: the branch does not exist, or was removed.
            MismatchError: the snapshot does not fit the tensors.
            SnapshotMarkedBadError: the snapshot is marked ``bad`` or ``damaged``.
            DamageError: stored data is damaged.
            NoSpaceError: what changes does not fit into the memory that is free.
            BackendUnavailableError: the store cannot be read now.
        """
        try:
            with self._polling:
                try:
                    return self._poll(self._ref if address is None else address, verify=verify)
                finally:
                    self._is_staging = False
        finally:
            self._deliver()

    def _poll(self, address: str, *, verify: bool) -> FeedVersion | None:
        if self._closed.is_set():
            raise InputError(f"the feed of {self._ref!r} was closed: call follow again", object_id=self._ref)
        self._idle_at = None
        view = self._newest_view()
        info = self._find(address, view)
        root = info.root.hex()
        with self._lock:  # until here, `swap` may have taken what is staged
            if verify:
                self._ids = {}
            elif self._version is not None and self._version.root == root:
                head, self._staged = view.head(), None
                self._idle_at = head.n if head is not None and address == self._ref else None
                return None
            elif self._staged is not None and self._staged.version.root == root:
                return self._staged.version
            old, self._staged, self._is_staging = self._staged, None, True
        del old  # its memory is for the next one
        with memory_errors(f"staging {self._ref!r}"):
            try:
                self._staged = self._stage(info)
            except SnapshotExpiredError:
                newest = self._find(address, self._newest_view())
                if newest.ulid == info.ulid:
                    raise
                self._staged = self._stage(newest)
        return self._staged.version

    def wait(self, timeout_seconds: float | None = None) -> FeedVersion | None:
        """Looks until a version is staged, and returns it; None if there is none within `timeout_seconds`, or the feed was closed.

        Goes on while the store does not answer. After a poll that found nothing it asks for the next log entry alone; every tenth look is
        a poll, which also notices that the log was taken back. Where a version is staged already, it pauses before it looks, at least for
        as long as it took to stage that, so that another thread can swap it.

        Raises:
            BackendUnavailableError: the store did not answer the last poll before the timeout.
        """
        deadline = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
        staged, looks = self._staged, 0
        left = min(max(self._poll_seconds, staged.seconds), deadline - time.monotonic()) if staged is not None else 0
        if left > 0 and self._closed.wait(left):
            return None
        while True:
            trouble: BackendUnavailableError | None = None
            try:
                version = None if looks % LOOKS_A_POLL and self._is_idle() else self.poll()
            except BackendUnavailableError as exc:
                version, trouble = None, exc
            except InputError:
                if not self._closed.is_set():
                    raise
                return None
            if version is not None:
                return version
            left = min(self._poll_seconds, deadline - time.monotonic())
            if left <= 0:
                if trouble is not None:
                    raise trouble
                return None
            if self._closed.wait(left):
                return None
            looks += 1

    def _is_idle(self) -> bool:
        """Whether the branch was at `version`, and the log has no entry since: one request, where a poll that finds nothing is two."""
        idle_at = self._idle_at  # another thread's poll may change it
        try:
            return idle_at is not None and self._engine.log.chain.read(idle_at + 1) is None
        except BrokenLogError:
            return False  # a poll reads what can be read

    def swap(self) -> FeedVersion | None:
        """Makes the tensors the staged version, and returns it; None if nothing is staged, or another thread is staging.

        Only copies in memory: call it between two uses of the tensors, such as a save in the background that has them in ``frozen=``. All
        tensors change, or none: after an error they are the version that they were.
        """
        try:
            with self._lock:
                staged = None if self._is_staging else self._staged
                if staged is None:
                    return None
                streams = _streams_of(staged.tensors)
                for own, callers in streams:  # what the caller has queued may read the tensors
                    own.wait_stream(callers)
                try:
                    return shielded(lambda: self._apply(staged), finish=True)
                finally:
                    for own, callers in streams:
                        callers.wait_stream(own)
        finally:
            self._deliver()

    def _apply(self, staged: _Staged) -> FeedVersion:
        started = time.perf_counter()
        begun: list[Change] = []

        def apply(change: Change) -> None:
            begun.append(change)
            change.apply()

        try:
            for_each(staged.changes, apply, min(cpu_threads(), len(staged.changes)))
            changed = [tensor.tensor for tensor in staged.tensors if tensor.changes and not tensor.tensor.is_inference()]
            torch.autograd.graph.increment_version(changed)
        except BaseException:
            for change in begun:
                change.undo()
            raise
        finally:
            self._on_change()
        self._version, self._ids, self._staged = staged.version, staged.ids, None
        self._note("swapped", staged.version, pause_seconds=time.perf_counter() - started)
        return staged.version

    def _newest_view(self) -> RefTable:
        return self._engine.log.readable_view(next_first=True)

    def _find(self, address: str, view: RefTable) -> SnapshotRow:
        info = self._engine.resolve(address, view).info
        refuse_marked(Snapshot.from_info(info), address, "move the branch to it")
        return info

    def _stage(self, info: SnapshotRow) -> _Staged:
        started = time.perf_counter()
        content = open_snapshot(self._engine, info, layouts=self._layouts)
        what = f"{self._ref}, step {info.step}, root {info.root.hex()[:16]}"
        tensors, boxes = match_tensors(content, self._wanted, what)
        with _on_own_streams(tensors):
            blocks = content.blocks_of(boxes)
            held = HeldBlocks(self._ids, blocks)
            missing = held.missing(blocks)
            size_bytes = sum(block.raw for block in missing)
            if not self._ids:
                require_memory(size_bytes, f"staging {what}", "load the weights of a nearby version first, or follow less of it (select=)")
            read = ChangesReader(held)
            read(self._engine, info, missing)
        if read.found_changed and self._ids:  # by somebody, perhaps also where no difference shows it
            self._ids = {}
            del tensors, boxes, blocks, held, missing, read  # their memory is for the second attempt
            return self._stage(info)
        changes = [change for tensor in tensors for change in tensor.changes]
        version = FeedVersion(info.root.hex(), info.step, info.time_ns, self._engine.clock)
        self._note(
            "fetched",
            version,
            fetch_seconds=(seconds := time.perf_counter() - started),
            read_bytes=read.read_bytes,
            changed_bytes=size_bytes,
            staged_bytes=sum(change.size_bytes for change in changes),
        )
        return _Staged(
            version, tensors, changes, {place_of(block): block.source.part.block_id(block.row) for block in blocks}, seconds=seconds
        )

    def _note(self, kind: Kind, version: FeedVersion, **fields: float) -> None:
        about: dict[str, float | str] = {"root": version.root, "age_seconds": version.age_seconds}
        self._events.append(Event(kind, "", self._ref, version.step, rank=0, time_ns=self._engine.clock(), fields={**about, **fields}))

    def _deliver(self) -> None:
        while True:
            try:
                event = self._events.popleft()
            except IndexError:  # perhaps another thread delivers the last one
                return
            self._engine.observers.emit(event)


def _streams_of(tensors: Sequence[FollowedTensor]) -> list[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
    """Of each CUDA device of the tensors: the stream on which changes are made, and the current one of this thread."""
    devices = {tensor.tensor.device for tensor in tensors if tensor.tensor.is_cuda}
    return [(torch.cuda.default_stream(device), torch.cuda.current_stream(device)) for device in devices]


@contextmanager
def _on_own_streams(tensors: Sequence[FollowedTensor]) -> Iterator[None]:
    """This thread reads tensors on the devices' own streams, as its helpers do: after the last swap, and after what it queued before."""
    with ExitStack() as stack:
        for own, callers in _streams_of(tensors):
            own.wait_stream(callers)
            stack.enter_context(torch.cuda.stream(own))
        yield
