"""`Feed`: keeps tensors at the newest snapshot of a branch. Writes nothing to the store."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Self

import torch

from tensorstore_ck.common.host_memory import memory_errors
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import cpu_threads, for_each, shielded
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import BackendUnavailableError, BrokenLogError, InputError, InvalidOptionError, SnapshotExpiredError
from tensorstore_ck.events import Event, Kind
from tensorstore_ck.feed.feed_ranks import FeedRanks, Look
from tensorstore_ck.feed.followed_tensor import Change, FollowedTensor
from tensorstore_ck.feed.host_cache import HostCache
from tensorstore_ck.feed.match_tensors import Wanted
from tensorstore_ck.feed.shared_ranges import SharedRanges
from tensorstore_ck.feed.stage_version import FeedVersion, StagedVersion, VersionStager, streams_of
from tensorstore_ck.log import RefTable, SnapshotRow
from tensorstore_ck.log.snapshot import Snapshot, refuse_marked

POLL_SECONDS: Final = 1.0
LOOKS_A_POLL: Final = 10
"""A `wait` that found nothing asks for the next log entry alone, until as many looks; then it also sees whether the log went back."""


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
        ranks: FeedRanks | None = None,
    ) -> None:
        """See `Store.follow`. `on_change` is called when a swap has changed tensors, or has undone that."""
        if not poll_seconds > 0:
            raise InvalidOptionError(f"poll_seconds must be above 0, not {poll_seconds}", object_id="poll_seconds")
        if host_cache is not None and not engine.backend.is_local:
            cache = HostCache(engine.backend, host_cache)
            engine = replace(engine, backend=cache, forget_copies=cache.distrust)
        self._engine, self._ref, self._poll_seconds = engine, ref, poll_seconds
        self._stager = VersionStager(engine, ref, wanted)
        self._ranks = ranks
        self._on_change = on_change
        self._polling = threading.Lock()
        """One thread at a time looks for a version."""
        self._lock = threading.Lock()
        """Held while tensors change."""
        self._is_staging = False
        self._closed = Flag()
        self._staged: StagedVersion | None = None
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
        if self._polling.acquire(blocking=self._ranks is None):  # among ranks a poll ends when all have come to it, and then does this
            try:
                self._drop()
            finally:
                self._polling.release()

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
        return self._look(self._ref if address is None else address, verify=verify)[0]

    def _look(
        self, address: str, *, verify: bool = False, waits: bool = False, is_quick: bool = False, is_last: bool = False
    ) -> tuple[FeedVersion | None, bool]:
        """A poll, and whether no rank looks again. `waits`: of a `wait`, as are `is_quick` and `is_last`."""
        try:
            with self._polling:
                if self._closed.is_set() and not (self._ranks and waits):  # else the other ranks learn it from this poll
                    raise InputError(f"the feed of {self._ref!r} was closed: call follow again", object_id=self._ref)
                try:
                    with memory_errors(f"staging {self._ref!r}"):
                        if self._ranks is None:
                            return self._poll(address, verify=verify, is_quick=is_quick), is_last
                        return self._poll_together(self._ranks, address, verify=verify, is_quick=is_quick, is_last=is_last)
                finally:
                    self._is_staging = False
                    if self._ranks is not None and self._closed.is_set():
                        self._drop()
        finally:
            self._deliver()

    def _poll(self, address: str, *, verify: bool, is_quick: bool) -> FeedVersion | None:
        root = "" if verify else _root_of(self._version)
        info = self._find(address, root, is_quick=is_quick)
        if info is None:
            self._drop()
        elif self._must_stage(info.root.hex(), verify=verify):
            try:
                self._stager.plan(info)
                self._staged = self._stager.read()
            except SnapshotExpiredError:
                newest = self._find(address, "", is_quick=False)
                if newest is None or newest.ulid == info.ulid:
                    raise
                self._stager.plan(newest)
                self._staged = self._stager.read()
            self._note_fetched(self._staged)
        staged = self._staged  # another thread may swap it
        return None if staged is None else staged.version

    def _poll_together(
        self, ranks: FeedRanks, address: str, *, verify: bool, is_quick: bool, is_last: bool
    ) -> tuple[FeedVersion | None, bool]:
        """As `_poll`, on all ranks: each stages the snapshot that rank 0 finds, or none does."""
        is_planned = False

        def plan(ulid: Ulid) -> bytes:
            nonlocal is_planned
            info = self._engine.log.readable_view().snapshot(ulid) or self._newest_view().snapshot(ulid)
            if info is None:
                raise BackendUnavailableError(
                    f"this rank does not see the snapshot that rank 0 found at {address!r}: do all ranks open one store?", object_id=address
                )
            is_planned = self._must_stage(info.root.hex(), verify=verify)
            if not is_planned:
                return b""
            self._stager.plan(info)
            return self._stager.reads()

        def read(shared: SharedRanges | None) -> None:
            if is_planned:
                self._staged = self._stager.read(shared)

        look = Look(address, verify=verify, root=_root_of(self._version), is_closed=self._closed.is_set(), is_last=is_last)
        find = lambda common: self._find(address, "" if verify else common, is_quick=is_quick)  # noqa: E731
        try:
            is_new, ends = ranks.poll(look, find, plan, read)
        except BaseException:
            if is_planned:
                self._drop()
            raise
        if not is_new:
            self._drop()
            return None, ends
        staged = self._staged  # another thread may swap it
        if is_planned and staged is not None:
            self._note_fetched(staged)
        return self._version if staged is None else staged.version, ends

    def _find(self, address: str, root: str, *, is_quick: bool) -> SnapshotRow | None:
        """The snapshot at the address; None if that is the one with `root`. `is_quick`: if there is no log entry since, look no further."""
        if is_quick and root and self._is_idle():
            return None
        self._idle_at = None
        view = self._newest_view()
        info = self._engine.resolve(address, view).info
        refuse_marked(Snapshot.from_info(info), address, "move the branch to it")
        if info.root.hex() != root:
            return info
        head = view.head()
        self._idle_at = head.n if head is not None and address == self._ref else None
        return None

    def _must_stage(self, root: str, *, verify: bool) -> bool:
        """Whether a version is neither what the tensors are nor staged; if so, drops what is staged."""
        with self._lock:  # until here, `swap` may have taken what is staged
            if verify:
                self._stager.ids = {}
            elif root in (_root_of(self._version), _root_of(self._staged and self._staged.version)):
                return False
            self._staged, self._is_staging = None, True  # its memory is for the next one
            return True

    def _drop(self) -> None:
        with self._lock:
            self._staged = None

    def wait(self, timeout_seconds: float | None = None) -> FeedVersion | None:
        """Looks until a version is staged, and returns it; None if there is none within `timeout_seconds`, or the feed was closed.

        Goes on while the store does not answer. After a poll that found nothing it asks for the next log entry alone; every tenth look is
        a poll, which also notices that the log was taken back. Where a version is staged already, it pauses before it looks, at least for
        as long as it took to stage that, so that another thread can swap it.

        Raises:
            BackendUnavailableError: the store did not answer the last poll before the timeout; with a group, at all.
        """
        deadline = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
        staged, looks = self._staged, 0
        left = min(max(self._poll_seconds, staged.seconds), deadline - time.monotonic()) if staged is not None else 0
        if left > 0:
            self._closed.wait(left)
        while True:
            is_last = self._closed.is_set() or time.monotonic() >= deadline
            version, ends = None, False
            try:
                version, ends = self._look(self._ref, waits=True, is_quick=bool(looks % LOOKS_A_POLL), is_last=is_last)
            except BackendUnavailableError:
                if is_last or self._ranks is not None:  # all ranks raise
                    raise
            except InputError:
                if not self._closed.is_set():
                    raise
                return None
            if version is not None or ends:
                return version
            self._closed.wait(max(0.0, min(self._poll_seconds, deadline - time.monotonic())))
            looks += 1

    def _is_idle(self) -> bool:
        """Whether the branch was at `version`, and the log has no entry since: one request, where a poll that finds nothing is two."""
        idle_at = self._idle_at
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
                with _in_order([] if staged is None else staged.tensors):  # in the caller's thread, which has the caller's stream
                    if self._ranks is not None:
                        return self._swap_together(self._ranks, staged)
                    return None if staged is None else shielded(lambda: self._swap_alone(staged), finish=True)
        finally:
            self._deliver()

    def _swap_together(self, ranks: FeedRanks, staged: StagedVersion | None) -> FeedVersion | None:
        """As `swap`, on all ranks or on none."""
        version = None if self._is_staging else self._version if staged is None else staged.version
        before = self._version, self._stager.ids, self._staged
        done: list[_Done] = []

        def apply() -> None:
            if staged is not None:
                shielded(lambda: done.append(self._make(staged)), finish=True)

        def undo() -> None:
            done[0].undo()
            self._version, self._stager.ids, self._staged = before

        try:
            is_swapped = ranks.swap(_root_of(version), apply, is_staged=staged is not None)
        except BaseException:
            if done:
                shielded(undo, finish=True)
            raise
        if staged is not None and done:
            self._note_swapped(staged, done[0])
        return version if is_swapped else None

    def _swap_alone(self, staged: StagedVersion) -> FeedVersion:
        self._note_swapped(staged, self._make(staged))
        return staged.version

    def _make(self, staged: StagedVersion) -> "_Done":
        """Makes the tensors the staged version, all or none, and notes that."""
        done = self._change(staged)
        self._version, self._stager.ids, self._staged = staged.version, staged.ids, None
        return done

    def _change(self, staged: StagedVersion) -> "_Done":
        """Makes the tensors the staged version, all or none."""
        done = _Done(self._on_change)

        def apply(change: Change) -> None:
            done.begun.append(change)
            change.apply()

        try:
            for_each(staged.changes, apply, min(cpu_threads(), len(staged.changes)))
            changed = [tensor.tensor for tensor in staged.tensors if tensor.changes and not tensor.tensor.is_inference()]
            torch.autograd.graph.increment_version(changed)
        except BaseException:
            done.undo()
            raise
        self._on_change()
        return done

    def _note_swapped(self, staged: StagedVersion, done: "_Done") -> None:
        self._note("swapped", staged.version, pause_seconds=time.perf_counter() - done.started)

    def _newest_view(self) -> RefTable:
        return self._engine.log.readable_view(next_first=True)

    def _note_fetched(self, staged: StagedVersion) -> None:
        self._note(
            "fetched",
            staged.version,
            fetch_seconds=staged.seconds,
            read_bytes=staged.read_bytes,
            changed_bytes=staged.changed_bytes,
            staged_bytes=sum(change.size_bytes for change in staged.changes),
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


def _root_of(version: FeedVersion | None) -> str:
    return "" if version is None else version.root


class _Done:
    """What a swap has changed so far."""

    def __init__(self, on_undone: Callable[[], object]) -> None:
        self.started = time.perf_counter()
        self.begun: list[Change] = []
        self._on_undone = on_undone

    def undo(self) -> None:
        for change in self.begun:
            change.undo()
        self._on_undone()


@contextmanager
def _in_order(tensors: Sequence[FollowedTensor]) -> Iterator[None]:
    """What changes tensors on devices comes after what the caller has queued, which may read them, and before what it queues later."""
    streams = streams_of(tensors)
    for own, callers in streams:
        own.wait_stream(callers)
    try:
        yield
    finally:
        for own, callers in streams:
            callers.wait_stream(own)
