"""One attempt of a group to do one thing together, a put or a restore, so that all ranks learn the same outcome.

    turn           whether it takes place at all, where rank 0 says so before anybody prepares
    hello/<rank>   what each rank is about to do; rank 0 waits for all and compares
    go             what rank 0 tells all, after which each rank does its work
    done/<rank>    what came of it; rank 0 waits for all and commits, which decides the outcome
    failed         a rank that could not: rank 0 waits no longer
    outcome        what the log says: {put: record}, {abort: reason}, or {ask: reason} when rank 0 could not find out

The log is the judge, through `Duties.settle`: whoever gives up, rank 0 or another, first has the log say "abort", unless it says "put"
already. The channel only spreads what the log says, so a rank that dies or stalls anywhere, or a channel that breaks, costs time and an
attempt, never agreement. A restore leaves nothing in the log; there the first outcome in the channel counts. Knows no torch, no formats
and no backend.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from tensorstore_ck.envelope import Body, take, take_count
from tensorstore_ck.errors import CorruptObjectError, SnapshotAbortedError
from tensorstore_ck.ids import Ulid
from tensorstore_ck.ranks.channel import Channel, ChannelError, LateError, SilentError, decode_record, encode_record
from tensorstore_ck.ranks.wording import error_text, named_ranks, sayings, unheard

GRACE_SECONDS: Final = 10.0
"""How long after the deadline the other ranks leave it to rank 0 to end the attempt."""
TURN, GO, OUTCOME, FAILED = "turn", "go", "outcome", "failed"


class Duties(NamedTuple):
    """What the caller does in an attempt. Records are small maps of what msgpack has; an error that one raises aborts the attempt."""

    hello: Callable[[], Body]
    """What this rank is about to do."""
    work: Callable[[Body], Body]
    """Does this rank's part, durably, and says what came of it; gets the record of `compare`."""
    settle: Callable[[str], Body | None] | None
    """Has the log say "abort" unless it says "put" already; the outcome's record if put, None if aborted. The reason is for people.
    None for what leaves nothing in the log."""
    compare: Callable[[list[Body]], Body | str]
    """On rank 0, with the hellos of all ranks in order: what to tell all, or why this cannot be done."""
    commit: Callable[[list[Body]], Body]
    """On rank 0, with what came of the work of all ranks, in order: appends the put to the log; the outcome's record."""


class Ledger:
    """Which attempts of this rank go on, and which keys it wrote in those that ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._open: set[int] = set()
        self._ended: dict[int, Channel] = {}

    def begin(self) -> int:
        """The number of the next attempt, from 1."""
        with self._lock:
            self._count += 1
            self._open.add(self._count)
            return self._count

    def end(self, n: int, channel: Channel | None) -> None:
        """Attempt `n` is over for this rank: it asks for none of its keys any more."""
        with self._lock:
            self._open.discard(n)
            if channel is not None:
                self._ended[n] = channel

    def oldest(self) -> int:
        """The lowest attempt that goes on."""
        with self._lock:
            return min(self._open, default=self._count + 1)

    def take_before(self, n: int) -> list[Channel]:
        """The channels of attempts that ended, up to `n`; each is returned once."""
        with self._lock:
            return [self._ended.pop(ended) for ended in sorted(self._ended) if ended < n]


class _RefusedError(Exception):
    """Why the attempt cannot go on, in words for all ranks."""


class Attempt:
    """One rank's side of one attempt."""

    def __init__(
        self,
        channel: Channel,
        ledger: Ledger,
        *,
        n: int,
        txn: Ulid,
        rank: int,
        ranks: int,
        title: str,
        object_id: str,
        timeout: float,
        grace: float,
        misfit: str = "",
    ) -> None:
        """`title` is for messages, like "the put to 'runs/gpt'"; each of `agree` and `run` has `timeout` seconds.

        `misfit`: why this rank has no place in the group; then it tells the others, and no outcome is its own.
        """
        self.n = n
        """Its number in the group, from 1."""
        self.txn = txn
        """Names this attempt in the log; the same on all ranks, and never used twice."""
        self._channel = channel
        self._ledger = ledger
        self._rank = rank
        self._ranks = ranks
        self._title = title
        self._object_id = object_id
        self._timeout = timeout
        self._grace = grace
        self._misfit = misfit
        self._deadline = channel.clock() + timeout
        self._stage = "hello"
        self._is_counted = False
        """Whether this rank may have said that its work is done: without that, what was put is not its own."""
        self._is_cut_off = False

    def agree(self, decide: Callable[[], Body]) -> Body:
        """What rank 0 decides about this attempt before it is run; the others wait for that.

        Raises:
            SnapshotAbortedError: rank 0 said nothing in time.
        """
        try:
            if self._rank == 0:
                decided = _plain(decide())
                self._put(TURN, decided)
                return decided
            if self._misfit:
                raise LateError(self._misfit)
            key, told = self._channel.wait([OUTCOME, TURN], self._patience(), writer=0)
            if key == TURN:
                return told
            reason = str(told.get("abort", "rank 0 could not begin it"))
        except ChannelError as exc:
            self.leave()
            raise self._aborted(f"rank {self._rank} waited for rank 0 to say whether it takes place: {exc}") from exc
        self.leave()
        raise self._aborted(reason)

    def leave(self) -> None:
        """It does not take place, as all ranks were told."""
        self._ledger.end(self.n, self._channel)

    def run(self, duties: Duties) -> Body:
        """Takes part, and returns the outcome's record; once only.

        Ends by the deadline, which is the timeout from now, when rank 0 is gone by twice the grace later, and when the store hangs some
        seconds after that; apart from what `duties` take. The deadline of all is rank 0's, from when it says go.

        Raises:
            SnapshotAbortedError: the outcome is "abort", as on all other ranks; the cause is this rank's own error if it had one.
            StoreError: `Duties.settle` failed: the log did not say what the outcome is.
        """
        self._deadline = self._channel.clock() + self._timeout
        try:
            return self._lead(duties) if self._rank == 0 else self._follow(duties)
        finally:
            self._ledger.end(self.n, self._channel)

    # --- rank 0 -------------------------------------------------------------------------------------------------------

    def _lead(self, duties: Duties) -> Body:
        try:
            hellos = self._collect(_plain(duties.hello()))
            answer = duties.compare([take(hello, "record", dict) for hello in hellos])
            if isinstance(answer, str):
                raise _RefusedError(answer)
            oldest = min(take_count(hello, "oldest") for hello in hellos)
            answer = _plain(answer)
            left = max(0.0, self._deadline - self._channel.clock())
            self._put(GO, {"record": answer, "left": left, "oldest": oldest})
            self._forget(oldest)
            self._stage = "done"
            dones = self._collect(_plain(duties.work(answer)))
            outcome = _plain(duties.commit([take(done, "record", dict) for done in dones]))
        except BaseException as exc:
            reason = _said(exc) if isinstance(exc, _RefusedError) else f"rank 0: {_said(exc)}"
            settled = self._settle(duties, reason)
            if not isinstance(exc, Exception):
                raise  # all others know; this one was told to stop
            if settled is None:
                raise self._aborted(reason) from (None if isinstance(exc, _RefusedError) else exc)
            return settled
        told = self._spread({"put": outcome})
        if duties.settle is None and "put" not in told:
            raise self._aborted(str(told.get("abort", "the other ranks cannot be told")))
        return outcome

    def _collect(self, own: Body) -> list[Body]:
        """What all ranks said in this stage.

        Raises:
            _RefusedError: names the ranks that failed, and those that said nothing by the deadline or are not heard of.
        """
        stage = self._stage
        keys = {f"{stage}/{rank}": rank for rank in range(1, self._ranks)}
        found, alarm, silent = self._channel.collect(keys, self._deadline, alarm=FAILED)
        said: list[Body] = [{"record": own, "oldest": self._ledger.oldest()}]
        errors: dict[int, str] = {}
        missing = []
        if alarm is not None:
            with suppress(CorruptObjectError, TypeError, ValueError):
                record = decode_record(alarm, FAILED)
                errors[take_count(record, "rank")] = take(record, "error", str)
        for key, rank in keys.items():
            if key not in found:
                missing.append(rank)
                continue
            try:
                said.append(_check_said(decode_record(found[key], key), stage))
            except _RefusedError as exc:
                errors[rank] = str(exc)
            except (CorruptObjectError, TypeError, ValueError) as exc:
                errors[rank] = f"sent a damaged {stage}: {exc}"
        reasons = [sayings(errors)] if errors else []
        if silent:
            reasons.append(unheard(silent, self._channel.watch.limit))
        elif missing and not errors and alarm is None:
            what = "did not come to it" if stage == "hello" else "came to it but did not finish"
            reasons.append(f"{named_ranks(missing)} of {self._ranks} {what} within {self._timeout:g} s")
        if reasons or alarm is not None:
            raise _RefusedError("; ".join(reasons) or "a rank failed")
        return said

    # --- all others ---------------------------------------------------------------------------------------------------

    def _follow(self, duties: Duties) -> Body:
        own: Exception | None = None
        try:
            if self._misfit:
                raise _RefusedError(self._misfit)
            self._put(f"hello/{self._rank}", {"record": duties.hello(), "oldest": self._ledger.oldest()})
            key, answer = self._channel.wait([OUTCOME, GO], self._patience(), writer=0)
            if key == GO:
                done = {"record": duties.work(self._enter(answer))}
                self._is_counted = True
                self._put(f"done/{self._rank}", done)
            outcome = self._wait_for_outcome()
        except ChannelError as exc:
            return self._give_up(duties, exc)
        except BaseException as exc:
            self._report(_said(exc))
            if not isinstance(exc, Exception):
                raise
            own = exc
            try:
                outcome = self._wait_for_outcome()
            except ChannelError as late:
                return self._give_up(duties, late, own)
        if type(outcome.get("put")) is dict:
            return self._own(take(outcome, "put", dict))
        if type(outcome.get("abort")) is str:
            raise self._aborted(outcome["abort"]) from (None if isinstance(own, _RefusedError) else own)
        return self._give_up(duties, LateError(f"rank 0 does not know the outcome: {outcome.get('ask')}"), own)

    def _enter(self, go: Body) -> Body:
        """Rank 0 said go: everything that all ranks have ended can be deleted, and the deadline is rank 0's."""
        record = take(go, "record", dict)
        self._deadline = self._channel.clock() + min(max(0.0, take(go, "left", float)), self._timeout)
        self._stage = "done"
        self._forget(take_count(go, "oldest"))
        return record

    def _wait_for_outcome(self) -> Body:
        return self._channel.wait([OUTCOME], self._patience(), writer=0)[1]

    def _patience(self) -> float:
        """When this rank gives up on rank 0: one after the other, so that the first one tells all and the log is asked once."""
        return self._deadline + self._grace * (1 + self._rank / self._ranks)

    def _report(self, text: str) -> None:
        """Tells rank 0 that this rank cannot."""
        if self._is_cut_off:
            return
        with suppress(ChannelError):
            self._put(f"{self._stage}/{self._rank}", {"error": text})
            self._put(FAILED, {"rank": self._rank, "error": text})

    def _give_up(self, duties: Duties, trouble: ChannelError, own: Exception | None = None) -> Body:
        """Rank 0 or the channel is gone: what the log says counts."""
        text = f"gave up on rank 0: {trouble}"
        reason = f"rank {self._rank} {text}"
        if self._channel.clock() < self._patience() and not isinstance(trouble, SilentError):
            self._channel.sleep(self._grace * self._rank / self._ranks)  # not all ranks at the log at once
        settled = self._settle(duties, reason)
        if settled is None:
            self._report(text)
            raise self._aborted(reason) from (own or trouble)
        return self._own(settled)

    def _own(self, put: Body) -> Body:
        """What was put, if this rank has a part in it."""
        if not self._is_counted:
            raise self._aborted(self._misfit or "the process group's store holds what another group left, which put something else")
        return put

    # --- both ---------------------------------------------------------------------------------------------------------

    def _settle(self, duties: Duties, reason: str) -> Body | None:
        """The outcome by its judge, which all who can be reached are told."""
        if duties.settle is None:
            put = self._spread({"abort": reason}).get("put")
            return put if type(put) is dict else None
        try:
            settled = duties.settle(reason)
        except BaseException:
            if self._rank == 0:
                self._spread({"ask": reason})
            raise
        self._spread({"abort": reason} if settled is None else {"put": settled})
        return settled

    def _spread(self, outcome: Body) -> Body:
        """Tells all, unless somebody was faster; returns what they are told, which is nothing when the channel is gone."""
        try:
            return self._channel.put_first(OUTCOME, outcome, self._deadline + self._grace)
        except ChannelError:
            self._is_cut_off = True
            return {}  # who is not told asks the log

    def _put(self, key: str, record: Body) -> None:
        self._channel.put(key, record, self._deadline + self._grace)

    def _forget(self, oldest: int) -> None:
        """Deletes what this rank wrote in attempts that all ranks have ended: nobody asks for it any more."""
        for channel in self._ledger.take_before(oldest):
            channel.delete(channel.written, self._deadline)

    def _aborted(self, reason: str) -> SnapshotAbortedError:
        return SnapshotAbortedError(
            f"{self._title} was aborted: {reason}; nothing needs to be cleaned up, try again", object_id=self._object_id
        )


def _plain(record: Body) -> Body:
    """The record as other ranks read it."""
    return decode_record(encode_record(record, "of rank 0"), "of rank 0")


def _said(exc: BaseException) -> str:
    """An error in words for the other ranks."""
    return str(exc) if isinstance(exc, _RefusedError) else error_text(exc)


def _check_said(record: Body, stage: str) -> Body:
    """What a rank said, if it is what belongs into this stage."""
    error: Any = record.get("error")
    if type(error) is str:
        raise _RefusedError(error)
    take(record, "record", dict)
    if stage == "hello":
        take_count(record, "oldest")
    return record
