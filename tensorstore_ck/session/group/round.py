"""One round of a group: all ranks do one thing together, a save or a restore, and learn the same outcome.

    admit            rank 0's decision whether the round takes place, where it decides that before anybody prepares
    proposal/<rank>  what each rank is about to do; rank 0 waits for all of them and compares
    go               what rank 0 answers, after which each rank does its work
    <name>/<rank>    what some ranks report to rank 0 during that work; <name> is rank 0's answer: see `Round.ask`, `Round.answer`
    result/<rank>    what a rank did; rank 0 waits for all of them and commits, which decides the outcome
    failed           a rank failed: rank 0 stops waiting
    late             rank 0 has logged for which ranks it waits
    outcome          what the log says: {put: record}, {abort: reason}, or {ask: text} when rank 0 could not find out

The log decides, through `Participant.resolve`: a rank that gives up appends "abort" to the log unless it says "put" already. The channel
only spreads what the log says, so a rank that dies or stalls, or a channel that breaks, costs time and an attempt, never agreement. A
restore leaves nothing in the log; there the first outcome in the channel counts. A reported error carries its class (`FailureReason`), so
that all ranks raise the same one. Knows no torch, no formats and no backend.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.errors import (
    ConflictError,
    CorruptObjectError,
    InputError,
    InvalidOptionError,
    MismatchError,
    NoSpaceError,
    PermissionDeniedError,
    SnapshotExpiredError,
    StoreError,
    UndecidedError,
)
from tensorstore_ck.format.sealed import Body, take, take_count
from tensorstore_ck.session.group.channel import Channel, ChannelError, LateError, SilentError, decode_record, encode_record
from tensorstore_ck.session.group.failure_reason import DIFFERENT_CALLS, FailureReason, RankRefusedError, check_record
from tensorstore_ck.session.group.late_rank_warning import ASK_SECONDS, LATE_SECONDS, Wait
from tensorstore_ck.session.group.participant import Participant, RoundLedger
from tensorstore_ck.session.group.rank_messages import describe_ranks, error_text, named_ranks, unheard

GRACE_SECONDS: Final = 10.0  # the time after the deadline in which only rank 0 may end the round
CALL_WORDS: Final = 3
"""The words of a title that say which call it is: "the save to" ..."""
ADMIT, GO, OUTCOME, FAILED, LATE = "admit", "go", "outcome", "failed", "late"


class Round:
    """One rank's side of one round."""

    def __init__(
        self,
        channel: Channel,
        ledger: RoundLedger,
        *,
        n: int,
        txn: Ulid,
        rank: int,
        ranks: int,
        title: str,
        object_id: str,
        timeout: float,
        grace: float,
        misfit: FailureReason | None = None,
        in_job: Sequence[int] | None = None,
        waits: Wait | None = None,
    ) -> None:
        """`title` is for messages, like "the save to 'runs/gpt'"; each of `decide` and `run` has `timeout` seconds.

        `misfit`: why this rank does not belong to the group: it reports that, and takes no outcome as its own. `in_job`: see `named_ranks`.
        `waits`: logs that this rank waits for others to come.
        """
        self.n = n
        """Its number in the group, from 1."""
        self.txn = txn
        """Names this round in the log; the same on all ranks, and never used twice."""
        self._channel, self._ledger = channel, ledger
        self._rank, self._ranks = rank, ranks
        self._title, self._object_id = title, object_id
        self._timeout, self._grace = timeout, grace
        self._misfit, self._in_job = misfit, in_job
        self._waits = waits
        self._deadline = channel.clock() + timeout
        self._stage = "proposal"
        self._is_counted = False
        """Whether this rank may have reported its result. If not, the outcome does not include it."""
        self._is_cut_off = False

    def decide(self, choose: Callable[[], Body]) -> Body:
        """Rank 0's decision about this round before it is run. The other ranks wait for it.

        Raises:
            SnapshotAbortedError: rank 0 did not decide in time.
        """
        try:
            if self._rank == 0:
                self._put(ADMIT, decided := _plain(choose()))
                return decided
            if self._misfit:
                raise LateError(self._misfit.text)
            key, reported = self._channel.wait([OUTCOME, ADMIT], self._patience(), writer=0, on_late=self._report_silent_leader)
            if key == ADMIT:
                return reported
            reason = FailureReason.of_outcome(reported) or FailureReason(f"{self._named(0)} could not begin it")
        except ChannelError as exc:
            self.skip()
            who = f"{self._named(self._rank)} waited for {self._named(0)}"
            raise self._error(FailureReason(f"{who} to say whether it takes place: {exc}")) from exc
        self.skip()
        raise self._error(reason)

    def skip(self) -> None:
        """Ends the round without running it; all ranks know that."""
        self._ledger.end(self.n, self._channel)

    def run(self, participant: Participant) -> Body:
        """Takes part, and returns the outcome's record; once only.

        Ends by the deadline, which is the timeout from now, when rank 0 is gone by twice the grace later, and when the store hangs some
        seconds after that; apart from the time that `participant` takes. From rank 0's answer on, its deadline is that of all.

        Raises:
            InputError, DamageError, ConflictError: raised on a rank, or on rank 0 by `compare`; all ranks raise the same class.
            SnapshotAbortedError: the outcome is "abort" for another reason, on all ranks. The cause is this rank's own error if it had one.
            UndecidedError: `Participant.resolve` failed: the log did not say what the outcome is.
        """
        self._deadline = self._channel.clock() + self._timeout
        try:
            return self._lead(participant) if self._rank == 0 else self._follow(participant)
        finally:
            self._ledger.end(self.n, self._channel)

    def ask(self, name: str, ranks: Sequence[int], tell: Callable[[], bytes]) -> dict[int, bytes]:
        """The reports of some `ranks` to rank 0 during their work; rank 0's own report is empty. Returns nothing on other ranks.

        Called by these ranks, and by rank 0, in their `Participant.execute`.
        """
        others = [rank for rank in ranks if rank]
        if self._rank:
            if self._rank in others:
                self._channel.put_large(f"{name}/{self._rank}", tell(), self._deadline + self._grace)
            return {}
        records = self._gather(name, others)
        reported = {rank: self._channel.whole(f"{name}/{rank}", record, self._deadline + self._grace) for rank, record in records.items()}
        return {0: b""} | reported if 0 in ranks else reported

    def answer(self, name: str, data: bytes | None) -> bytes:
        """Rank 0's answer to all ranks during their work. The other ranks wait for it.

        Raises:
            RankRefusedError: the round was given up meanwhile.
        """
        if self._rank == 0:
            assert data is not None
            self._channel.put_large(name, data, self._deadline + self._grace)
            return data
        key, record = self._channel.wait([OUTCOME, name], self._patience(), writer=0)
        if key == OUTCOME:
            raise RankRefusedError(FailureReason.of_outcome(record) or FailureReason("the round was given up"))
        return self._channel.whole(name, record, self._deadline + self._grace)

    # --- rank 0 -------------------------------------------------------------------------------------------------------

    def _lead(self, participant: Participant) -> Body:
        try:
            proposals = self._collect(_plain(participant.propose()))
            self._require_same_call([take(proposal, "call", str) for proposal in proposals])
            answer = _plain(self._judged(lambda: participant.compare([take(proposal, "record", dict) for proposal in proposals])))
            oldest = min(take_count(proposal, "oldest") for proposal in proposals)
            self._put(GO, {"record": answer, "left": max(0.0, self._deadline - self._channel.clock()), "oldest": oldest})
            self._forget(oldest)
            self._stage = "result"
            results = self._collect(_plain(participant.execute(answer)))
            outcome = _plain(self._judged(lambda: participant.commit([take(result, "record", dict) for result in results])))
        except BaseException as exc:
            reason = _reason_of(exc, participant)
            reason = reason if isinstance(exc, RankRefusedError) else FailureReason.of_ranks({0: reason}, self._in_job)
            resolved = self._resolve(participant, reason)
            if not isinstance(exc, Exception):
                raise  # the others know; this rank was asked to stop
            if isinstance(resolved, FailureReason):
                raise self._error(resolved) from (exc.__cause__ if isinstance(exc, RankRefusedError) else exc)
            return resolved
        reported = self._spread({"put": outcome})
        if participant.resolve is None and "put" not in reported:
            raise self._error(FailureReason.of_outcome(reported) or FailureReason("the other ranks cannot be reached"))
        return outcome

    def _require_same_call(self, calls: Sequence[str]) -> None:
        """Raises `RankRefusedError` if the ranks are in rounds of different calls, such as a save and a restore."""
        if len({tuple(call.split()[:CALL_WORDS]) for call in calls}) > 1:
            text = f"the ranks make different calls: {describe_ranks(dict(enumerate(calls)), self._in_job)}"
            advice = "make the same calls in the same order on all ranks"
            raise RankRefusedError(FailureReason(f"{text}; {advice}", InvalidOptionError.kind, DIFFERENT_CALLS))

    def _judged(self, judge: Callable[[], Body | str]) -> Body:
        """Rank 0's conclusion from the records of all ranks.

        Raises:
            RankRefusedError: they do not fit together, which is no rank's own error.
        """
        try:
            answer = judge()
        except (NoSpaceError, PermissionDeniedError):
            raise  # errors of rank 0 itself
        except (InputError, ConflictError) as exc:
            raise RankRefusedError(FailureReason.of_error(exc, by_name=False)) from exc
        if isinstance(answer, str):
            raise RankRefusedError(FailureReason(answer, MismatchError.kind, self._object_id))
        return answer

    def _collect(self, own: Body) -> list[Body]:
        stage = self._stage
        return [{"record": own, **self._about()}, *self._gather(stage, range(1, self._ranks)).values()]

    def _gather(self, stage: str, ranks: Sequence[int]) -> dict[int, Body]:
        """The records of other ranks in a stage.

        Raises:
            RankRefusedError: names the ranks that failed, sent nothing by the deadline, or are silent.
        """
        keys = {f"{stage}/{rank}": rank for rank in ranks}
        on_late = self._report_missing if stage == "proposal" else None  # in later stages ranks work, each as long as it needs
        received, alarm, silent = self._channel.collect(keys, self._deadline, alarm=FAILED, on_late=on_late)
        records: dict[int, Body] = {}
        errors: dict[int, FailureReason] = {}
        missing = []
        if alarm is not None:
            with suppress(CorruptObjectError, TypeError, ValueError):
                record = decode_record(alarm, FAILED)
                errors[take_count(record, "rank")] = FailureReason.of_record(take(record, "error", dict))
        for key, rank in keys.items():
            if key not in received:
                missing.append(rank)
                continue
            try:
                records[rank] = decode_record(received[key], key)
                check_record(records[rank], stage)
            except RankRefusedError as exc:
                errors[rank] = exc.reason
            except (CorruptObjectError, TypeError, ValueError) as exc:
                errors[rank] = FailureReason(f"sent a damaged {stage}: {exc}")
        if errors:
            raise RankRefusedError(FailureReason.of_ranks(errors, self._in_job))
        if alarm is not None:
            raise RankRefusedError(FailureReason("a rank failed"))
        if silent:
            raise RankRefusedError(FailureReason(unheard(silent, self._channel.watch.limit, self._in_job)))
        if missing:
            what = "did not come to it" if stage == "proposal" else "came to it but did not finish"
            who = f"{named_ranks(missing, self._in_job)} of {self._ranks}"
            where = self._waits.elsewhere(missing) if self._waits is not None and stage == "proposal" else ""
            raise RankRefusedError(FailureReason(f"{who} {what} within {self._timeout:g} s{where}"))
        return records

    # --- all others ---------------------------------------------------------------------------------------------------

    def _follow(self, participant: Participant) -> Body:
        own: Exception | None = None
        try:
            if self._misfit:
                raise RankRefusedError(self._misfit)
            self._put(f"proposal/{self._rank}", {"record": participant.propose(), **self._about()})
            awaited = [GO, OUTCOME] if participant.begins_rounds else [OUTCOME, GO]
            key, answer = self._channel.wait(awaited, self._patience(), writer=0, on_late=self._report_silent_leader)
            if key == GO:
                result = {"record": participant.execute(self._enter(answer))}
                self._is_counted = True
                self._put(f"result/{self._rank}", result)
            outcome = self._wait_for_outcome()
        except ChannelError as exc:
            return self._give_up(participant, exc)
        except BaseException as exc:
            self._report(_reason_of(exc, participant))
            if not isinstance(exc, Exception):
                raise
            own = exc
            try:
                outcome = self._wait_for_outcome()
            except ChannelError as late:
                return self._give_up(participant, late, own)
        if type(outcome.get("put")) is dict:
            return self._own(take(outcome, "put", dict))
        reason = FailureReason.of_outcome(outcome)
        if reason is not None:
            raise self._error(reason) from (None if isinstance(own, RankRefusedError) else own)
        return self._give_up(participant, LateError(f"{self._named(0)} does not know the outcome: {outcome.get('ask')}"), own)

    def _enter(self, go: Body) -> Body:
        """Takes rank 0's deadline from its answer, and deletes the records of rounds that all ranks have ended."""
        record = take(go, "record", dict)
        self._deadline = self._channel.clock() + min(max(0.0, take(go, "left", float)), self._timeout)
        self._stage = "result"
        self._forget(take_count(go, "oldest"))
        return record

    def _wait_for_outcome(self) -> Body:
        return self._channel.wait([OUTCOME], self._patience(), writer=0)[1]

    def _patience(self) -> float:
        """When this rank gives up on rank 0. Ranks do so one after the other, so that the first one informs all and reads the log once."""
        return self._deadline + self._grace * (1 + self._rank / self._ranks)

    def _report(self, reason: FailureReason) -> None:
        if self._is_cut_off:
            return
        with suppress(ChannelError):
            self._put(f"{self._stage}/{self._rank}", {"error": reason.record()})
            self._put(FAILED, {"rank": self._rank, "error": reason.record()})

    def _give_up(self, participant: Participant, trouble: ChannelError, own: Exception | None = None) -> Body:
        """Lets the log decide, because rank 0 or the channel is gone."""
        text = f"gave up on {self._named(0)}: {trouble}"
        reason = FailureReason(f"{self._named(self._rank)} {text}")
        if self._channel.clock() < self._patience() and not isinstance(trouble, SilentError):
            self._channel.sleep(self._grace * self._rank / self._ranks)  # so that not all ranks read the log at once
        resolved = self._resolve(participant, reason)
        if isinstance(resolved, FailureReason):
            self._report(FailureReason(text))
            raise self._error(resolved) from (own or trouble)
        return self._own(resolved)

    def _own(self, put: Body) -> Body:
        """The outcome, if it includes this rank's result."""
        if not self._is_counted:
            raise self._error(self._misfit or FailureReason("the process group's store holds records of another group"))
        return put

    # --- both ---------------------------------------------------------------------------------------------------------

    def _about(self) -> Body:
        """What is sent with each proposal."""
        return {"oldest": self._ledger.oldest(), "call": self._title}

    def _resolve(self, participant: Participant, reason: FailureReason) -> Body | FailureReason:
        """Takes the outcome from the log, and sends it to all ranks that can be reached: the record, or why nothing was saved."""
        if participant.resolve is None:
            reported = self._spread({"abort": reason.record()})
            put = reported.get("put")
            return put if type(put) is dict else FailureReason.of_outcome(reported) or reason
        try:
            resolved = participant.resolve()
        except BaseException as exc:
            if self._rank == 0:
                self._spread({"ask": reason.text})
            if isinstance(exc, StoreError):
                what = f"whether {self._title} happened is not known here, since the log could not be read"
                raise UndecidedError(f"{what}: {error_text(exc)}", object_id=self._object_id, txn=self.txn) from exc
            raise
        if resolved is not None:
            self._spread({"put": resolved})
            return resolved
        return FailureReason.of_outcome(self._spread({"abort": reason.record()})) or reason

    def _spread(self, outcome: Body) -> Body:
        """Sends the outcome to all ranks, unless another rank was faster. Returns what they get; empty if the channel is gone."""
        try:
            return self._channel.put_first(OUTCOME, outcome, self._deadline + self._grace)
        except ChannelError:
            self._is_cut_off = True
            return {}  # ranks without an outcome read the log

    def _put(self, key: str, record: Body) -> None:
        self._channel.put(key, record, self._deadline + self._grace)

    def _forget(self, oldest: int) -> None:
        """Deletes the keys that this rank wrote in rounds that all ranks have ended."""
        for channel in self._ledger.take_before(oldest):
            channel.delete(channel.written, self._deadline)

    def _report_missing(self, missing: Sequence[int]) -> None:
        """Logs on rank 0, for all ranks, which ranks have not come."""
        if self._waits is not None:
            self._put(LATE, {})
            self._waits.report(missing, LATE_SECONDS)

    def _report_silent_leader(self) -> None:
        """Logs on the other ranks that rank 0 has not come, unless rank 0 has logged for which ranks it waits."""
        if self._waits is not None and self._channel.try_get(LATE, self._deadline) is None:
            self._waits.report([0], ASK_SECONDS)

    def _error(self, reason: FailureReason) -> StoreError:
        return reason.error(self._title, self._object_id)

    def _named(self, rank: int) -> str:
        return named_ranks([rank], self._in_job)


def _plain(record: Body) -> Body:
    return decode_record(encode_record(record, "of rank 0"), "of rank 0")


def _reason_of(exc: BaseException, participant: Participant) -> FailureReason:
    if isinstance(exc, RankRefusedError):
        return exc.reason
    if isinstance(exc, SnapshotExpiredError) and participant.resolve is not None:
        return FailureReason(error_text(exc))  # gc freed blocks that the save relied on: the next one relies on others
    return FailureReason.of_error(exc)
