"""The ranks that save and restore together: a process group's nonce, its count of rounds, and the thread that talks to its store.

A group uses a clone of the process group's store, on a thread of its own: a store client serves one call at a time, and a call can
hang for as long as the process that serves it is stopped. Here that costs a round, and never blocks the training thread.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tensorstore_ck.common.ids import ULID_BYTES, IdSource, Ulid, derived_hash, new_ulid, ulid_text
from tensorstore_ck.common.threads import Helper
from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.sealed import Body, take, take_count
from tensorstore_ck.session.group.channel import Channel, ChannelError, KeyValue, StoreRunner
from tensorstore_ck.session.group.failure_reason import FailureReason
from tensorstore_ck.session.group.late_rank_warning import ASK_SECONDS, Wait
from tensorstore_ck.session.group.liveness import DEAD_AFTER_SECONDS, Heartbeat, LivenessWatch, beat_seconds, end_thread
from tensorstore_ck.session.group.participant import Participant, RoundLedger
from tensorstore_ck.session.group.rank_messages import named_ranks
from tensorstore_ck.session.group.round import GRACE_SECONDS, Round

if TYPE_CHECKING:
    import torch.distributed

T = TypeVar("T")
_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[KeyValue], Any] | None] | None]
"""The request to replace the clone."""

ROOT: Final = "tsck/"
_TIME_BYTES: Final = 6
_NUMBER_BYTES: Final = 4
RENEW_SECONDS: Final = 10.0
"""How long reconnecting may take: torch tries to reach a server that is gone for as long as the store's own timeout."""


class StoreThread:
    """A `StoreRunner`: runs calls on a clone of a store, one after the other, on its own thread, until it is closed or dropped."""

    def __init__(self, store: Any) -> None:
        calls: _Calls = queue.SimpleQueue()
        self._calls = calls
        self._is_broken = Flag()
        # A daemon: a call that hangs must not keep the process from ending.
        thread = Helper(partial(_serve, store, calls, self._is_broken), "tsck-group")
        thread.start()
        self.close = weakref.finalize(self, end_thread, calls, thread)
        """Ends the thread; later calls time out. Idempotent."""

    def __call__(self, action: Callable[[KeyValue], T], seconds: float) -> T:
        """See `StoreRunner`."""
        result: T = self._ask(action, seconds)
        return result

    def renew(self) -> None:
        """Replaces the clone if a call to it failed: a broken connection stays broken.

        Raises:
            TimeoutError, RuntimeError, OSError: the store cannot be reached.
        """
        if self._is_broken.is_set():
            self._ask(None, RENEW_SECONDS)
            self._is_broken.clear()

    def _ask(self, action: Callable[[KeyValue], Any] | None, seconds: float) -> Any:
        call: Future[Any] = Future()
        self._calls.put((call, action))
        try:
            return call.result(seconds)
        except TimeoutError as exc:
            call.cancel()  # a call that has not begun never will
            raise TimeoutError(f"no answer within {seconds:.0f} s") from exc


def _serve(store: Any, calls: _Calls, is_broken: Flag) -> None:
    clone: Any = None
    while (item := calls.get()) is not None:
        call, action = item
        if not call.set_running_or_notify_cancel():
            continue
        try:
            clone = store.clone() if clone is None or action is None else clone
            call.set_result(action and action(clone))
        except BaseException as exc:  # noqa: BLE001 - the caller raises it
            if isinstance(exc, RuntimeError | OSError):
                is_broken.set()
            call.set_exception(exc)


class _Agreed(NamedTuple):
    """The message that rank 0 sends to all ranks when it first uses a group."""

    nonce: Ulid
    counters: str
    """The prefix of the ranks' counters: see `liveness`."""
    dead_after: float


class Group:
    """One rank's place in a group. All ranks begin the same rounds in the same order."""

    def __init__(
        self,
        run: StoreRunner,
        *,
        rank: int,
        ranks: int,
        scope: str,
        first: "Group | None" = None,
        dead_after: float = DEAD_AFTER_SECONDS,
        beat: Callable[[str, float], object] = lambda name, seconds: None,
        renew: Callable[[], object] = lambda: None,
        close: Callable[[], object] = lambda: None,
        new_id: IdSource = new_ulid,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        in_job: Sequence[int] | None = None,
        place: str = "",
        staging: str = "",
        on_dead: Callable[[int, str, float], object] = lambda *_: None,
    ) -> None:
        """`scope` separates groups that share a store but not their rounds, such as those of two tensorstore_ck stores.

        `renew` repairs a runner whose connection broke in an earlier round, and `close` ends it: see `StoreThread`. `beat` starts the
        heartbeat of this rank when the group is first used; a rank that is silent for longer than rank 0's `dead_after` is given up.
        `first`: a group of the same ranks that has begun a round, and whose heartbeats serve both. `in_job`: see `named_ranks`. `place`:
        the store and this host, for messages. `staging`: how this rank stages, in words; a rank that does so in another way than rank 0
        does not belong to the group, since it makes other rounds. `on_dead` is called once with each rank that this one gives up (its
        number in the job, its host, and the silence), from any thread.
        """
        self.rank = rank
        self.ranks = ranks
        self.in_job = in_job
        self._place, self._staging = place, staging
        self.run = run
        self.renew = renew
        """Repairs a broken connection of `run`; raises as `StoreThread.renew`."""
        self.close = close
        self.has_common_store = False
        """Whether rank 0 has found in the store what every rank wrote: see `require_common_store`."""
        self._beat, self._on_dead = beat, on_dead
        self._dead: dict[int, bytes] = {}
        """Rank -> the counter with which it was given up."""
        self._dead_after = dead_after
        self._first = first
        self._scope = f"{ROOT}{scope}/"
        self._new_id = new_id
        self._clock = clock
        self._sleep = sleep
        self._ledger = RoundLedger()
        self._generation = 1
        self._token = new_id()
        self._agreed = None if first is None else first.agreed._replace(nonce=second_nonce(first.agreed.nonce))
        self._misfit: FailureReason | None = None
        self._lock = threading.Lock()

    def begin(
        self, title: str, *, object_id: str, timeout: float, grace: float = GRACE_SECONDS, sleep: Callable[[float], object] | None = None
    ) -> Round:
        """The next round of the group, which the caller then runs. Waits for rank 0 if it is the first one.

        An error that `sleep` raises between two polls of the channel ends this rank's part in the round.

        Raises:
            SnapshotAbortedError: rank 0 did not begin it.
        """
        n = self._ledger.begin()
        elsewhere = self._elsewhere if n == 1 or self._agreed is None else lambda _: ""  # ranks that met once are in one store
        waits = Wait(title=title, rank=self.rank, ranks=self.ranks, timeout=timeout, in_job=self.in_job, elsewhere=elsewhere)
        try:
            self.renew()
            agreed = self._agree(self._clock() + timeout + grace, lambda: waits.report([0], ASK_SECONDS))
        except (ChannelError, RuntimeError, OSError) as exc:  # torch's store errors are RuntimeErrors
            self._ledger.end(n, None)
            own, zero = (named_ranks([rank], self.in_job) for rank in (self.rank, 0))
            where = elsewhere([0])
            raise FailureReason(f"{own} waited for {zero} to begin it: {exc}{where}").error(title, object_id) from exc
        # The ranks give up on rank 0 one after the other, so that the first one informs all.
        watch = LivenessWatch(
            agreed.counters,
            every=beat_seconds(agreed.dead_after),
            limit=agreed.dead_after + grace * self.rank / self.ranks,
            on_dead=self._note_dead,
        )
        return Round(
            self._channel(f"{ulid_text(agreed.nonce)}/{n}/", sleep, watch),
            self._ledger,
            n=n,
            txn=attempt_id(agreed.nonce, n),
            rank=self.rank,
            ranks=self.ranks,
            title=title,
            object_id=object_id,
            timeout=timeout,
            grace=grace,
            misfit=self._misfit,
            in_job=self.in_job,
            waits=waits if self._first is None else None,  # a second group's rounds wait for uploads, which have no deadline
        )

    def meet(
        self,
        title: str,
        propose: Callable[[], Body],
        compare: Callable[[list[Body]], Body | str],
        execute: Callable[[Body], Body | None],
        *,
        timeout: float,
        conclude: Callable[[list[Body]], Body] = lambda _: {},
    ) -> Body:
        """A round that leaves nothing in the log: all ranks propose, rank 0 compares, and all execute its answer. See `Participant`.

        Returns:
            What `conclude` on rank 0 made of what `execute` returned on all ranks.

        Raises:
            SnapshotAbortedError: a rank did not come, or failed.
            StoreError: `compare` found different input, on all ranks.
        """
        steps = Participant(propose, lambda go: execute(go) or {}, None, compare, commit=conclude)
        return self.begin(title, object_id=title, timeout=timeout).run(steps)

    @property
    def nonce(self) -> Ulid:
        """The nonce that rank 0 drew for this group; known once a round was begun."""
        return self.agreed.nonce

    @property
    def agreed(self) -> _Agreed:
        """The message that rank 0 sent to all ranks; known once a round was begun."""
        assert self._agreed is not None
        return self._agreed

    def _note_dead(self, rank: int, counter: bytes, seconds: float) -> None:
        """Reports a dead rank once. If the rank goes on and dies later, it then has another counter."""
        if self._dead.get(rank) != counter:
            self._dead[rank] = counter
            host = counter.partition(b" ")[2].decode("ascii", "replace")
            self._on_dead(rank if self.in_job is None else self.in_job[rank], host, seconds)

    def _channel(self, prefix: str, sleep: Callable[[float], object] | None = None, watch: LivenessWatch | None = None) -> Channel:
        return Channel(self.run, self._scope + prefix, ranks=self.ranks, watch=watch, clock=self._clock, sleep=sleep or self._sleep)

    def _agree(self, deadline: float, on_late: Callable[[], object]) -> _Agreed:
        """The message that rank 0 sent to this group. Starts the heartbeat of this rank.

        A process group that was destroyed and created again has the same keys in the same store, so each rank counts its groups there.
        """
        with self._lock:
            if self._agreed is None:
                self._agreed = self._draw(deadline, on_late)
                self._beat(f"{self._agreed.counters}{self.rank}", beat_seconds(self._agreed.dead_after))
            return self._agreed

    def _elsewhere(self, ranks: Sequence[int]) -> str:
        with suppress(ChannelError, TypeError):
            for rank in ranks:
                record, who = self._stores().try_get(str(rank), self._clock()), named_ranks([rank], self.in_job)
                if record is not None and take(record, "scope", str) == self._scope:
                    if take_count(record, "group") < self._generation:
                        return (
                            f" ({who} is late, or has not opened the store again, as this rank has: all ranks close and open it together)"
                        )
                elif record is not None:
                    where = take(record, "place", str)
                    here = f"this rank waits in {self._place}: ranks that save together open one store"
                    return f" ({who} was last in another store, {where}, and {here})"
        return ""

    def _stores(self) -> Channel:
        """Rank -> the store that it opened last for these ranks."""
        return Channel(self.run, f"{ROOT}stores/", ranks=self.ranks, clock=self._clock, sleep=self._sleep)

    def _draw(self, deadline: float, on_late: Callable[[], object]) -> _Agreed:
        channel = self._channel("")
        mine = False
        while not mine:  # with the same token after an error, since the first try may have been counted
            claimed = channel.put_first(f"groups/{self.rank}/{self._generation}", {"token": self._token}, deadline)
            mine = claimed.get("token") == self._token
            self._generation += not mine
        self._stores().put(str(self.rank), {"scope": self._scope, "place": self._place, "group": self._generation}, deadline)
        key = f"nonce/{self._generation}"
        if self.rank == 0:
            nonce = self._new_id()
            agreed = _Agreed(nonce, self._counters(nonce), self._dead_after)
            channel.set_unborn(self.ranks, agreed.counters, deadline)
            about = {"nonce": nonce, "ranks": self.ranks, "dead_after": self._dead_after, "staging": self._staging}
            channel.put(key, about, deadline)
            return agreed
        record = channel.wait([key], deadline, on_late=on_late)[1]
        try:
            nonce, ranks, dead_after = Ulid(take(record, "nonce", bytes)), take_count(record, "ranks"), take(record, "dead_after", float)
            staging = take(record, "staging", str)
        except TypeError as exc:
            raise ChannelError(str(exc)) from exc
        if len(nonce) != ULID_BYTES or not dead_after > 0:
            raise ChannelError(f"the nonce has {len(nonce)} bytes, and ranks are given up after {dead_after} s")
        if ranks != self.ranks:
            self._misfit = FailureReason(f"it came with world size {self.ranks}, and rank 0 with {ranks}")
        elif staging != self._staging:
            text = f"it opened the store {self._staging}, and rank 0 {staging}: open it in the same way on all ranks"
            self._misfit = FailureReason(text, InvalidOptionError.kind, "staging")
        return _Agreed(nonce, self._counters(nonce), dead_after)

    def _counters(self, nonce: Ulid) -> str:
        return f"{self._scope}{ulid_text(nonce)}/alive/"


def second_nonce(nonce: Ulid) -> Ulid:
    """The nonce of a second group of the same ranks, derived without a message: one rank may begin a round that another never does."""
    return Ulid(nonce[:_TIME_BYTES] + derived_hash("second group of the same ranks", nonce)[: ULID_BYTES - _TIME_BYTES])


def attempt_id(nonce: Ulid, n: int) -> Ulid:
    """The ULID of the n-th round of a group: the nonce's time and the number, so that they sort; then random bits."""
    drawn = derived_hash("attempt of a group", nonce, n.to_bytes(8, "big"))
    return Ulid(nonce[:_TIME_BYTES] + n.to_bytes(_NUMBER_BYTES, "big") + drawn[: ULID_BYTES - _TIME_BYTES - _NUMBER_BYTES])


def open_group(
    group: "torch.distributed.ProcessGroup",
    scope: str,
    *,
    dead_after: float = DEAD_AFTER_SECONDS,
    place: str = "",
    staging: str = "",
    first: Group | None = None,
    on_dead: Callable[[int, str, float], object] = lambda *_: None,
) -> Group:
    """This rank's place in a process group; the caller keeps it, one per process group object. See `Group`."""
    from torch.distributed import get_process_group_ranks  # noqa: PLC0415 - a caller with a group has loaded it

    store, in_job = group.get_group_store(), None
    with suppress(KeyError, ValueError):  # torch does not know a group that was made by hand: its ranks have no other numbers
        in_job = get_process_group_ranks(group)
    thread, heart = StoreThread(store), Heartbeat(store)

    def close() -> None:
        heart.close()
        thread.close()

    return Group(
        thread,
        rank=group.rank(),
        ranks=group.size(),
        scope=scope,
        first=first,
        dead_after=dead_after,
        place=place,
        staging=staging,
        beat=heart,
        renew=thread.renew,
        close=close,
        in_job=in_job,
        on_dead=on_dead,
    )
