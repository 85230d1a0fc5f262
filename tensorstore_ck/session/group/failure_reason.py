"""Why a round failed, as ranks report it to each other: the kind and text of an error, never a pickle.

Errors that would occur again have the same class on all ranks: input errors, verified damage, a ref that another process moved. Any other
error means that the round was aborted, and that trying again may help.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tensorstore_ck.errors import BY_KIND, ConflictError, DamageError, InputError, SnapshotAbortedError, StoreError
from tensorstore_ck.format.sealed import Body, take, take_count
from tensorstore_ck.session.group.rank_messages import MAX_TEXT, describe_ranks, error_text, shortened

LASTING: Final = (InputError, DamageError, ConflictError)
"""Classes of errors that all ranks raise as such. The first one counts: input errors, which the user can fix; then damage, which stays."""
DIFFERENT_CALLS: Final = "calls"
"""The `object_id` of the error that all ranks raise if they make different calls: each of them ends its call then, without the rounds that
would follow in it, so that all begin the next one together."""
CLEAN: Final = "nothing needs to be cleaned up"


class FailureReason(NamedTuple):
    """A text for all ranks, and the class of the error."""

    text: str
    kind: str = ""
    """The kind of a class in `LASTING`; empty: the round was aborted."""
    object_id: str = ""

    @classmethod
    def of_error(cls, exc: BaseException, *, by_name: bool = True) -> "FailureReason":
        """The reason for an error; `by_name`: the text begins with its class."""
        if not isinstance(exc, LASTING) or exc.kind not in BY_KIND:
            return cls(error_text(exc))
        return cls(error_text(exc) if by_name else shortened(str(exc), MAX_TEXT), exc.kind, exc.object_id)

    @classmethod
    def of_ranks(cls, reasons: Mapping[int, "FailureReason"], in_job: Sequence[int] | None = None) -> "FailureReason":
        """The reasons of several ranks as one, with the first class of `LASTING` among them, of its lowest rank."""
        first = min(reasons, key=lambda rank: (reasons[rank]._order(), rank))
        return reasons[first]._replace(text=describe_ranks({rank: reason.text for rank, reason in reasons.items()}, in_job))

    def _order(self) -> int:
        kind = BY_KIND.get(self.kind, SnapshotAbortedError)
        return next((at for at, error_class in enumerate(LASTING) if issubclass(kind, error_class)), len(LASTING))

    def record(self) -> Body:
        """The record that is sent to the other ranks."""
        return {"text": self.text, "kind": self.kind, "object": self.object_id}

    @classmethod
    def of_record(cls, record: Body) -> "FailureReason":
        """The reason that `record` encoded.

        Raises:
            TypeError: it is not one.
        """
        kind = take(record, "kind", str)
        is_lasting = issubclass(BY_KIND.get(kind, SnapshotAbortedError), LASTING)
        return cls(take(record, "text", str), kind if is_lasting else "", take(record, "object", str))

    @classmethod
    def of_outcome(cls, outcome: Body) -> "FailureReason | None":
        """Why the round failed, if the outcome says so."""
        try:
            return cls.of_record(take(outcome, "abort", dict))
        except TypeError:
            return None

    def error(self, title: str, object_id: str) -> StoreError:
        """The error that every rank raises for a round with that title."""
        kind = BY_KIND.get(self.kind, SnapshotAbortedError)
        if issubclass(kind, SnapshotAbortedError):
            return kind(f"{title} was aborted: {self.text}; {CLEAN}, try again", object_id=object_id)
        how = "failed" if issubclass(kind, DamageError) else "was refused"
        return kind(f"{title} {how}: {self.text}; {CLEAN}", object_id=self.object_id or object_id)


class RankRefusedError(Exception):
    """The round cannot go on, and no rank's own error is the cause. Rank 0 raises it. Never leaves this package."""

    def __init__(self, reason: FailureReason) -> None:
        super().__init__(reason.text)
        self.reason = reason


def check_record(record: Body, stage: str) -> None:
    """Checks that the record of a rank fits a stage of the round.

    Raises:
        RankRefusedError: the rank reports an error.
        TypeError: it does not fit.
    """
    if "error" in record:
        raise RankRefusedError(FailureReason.of_record(take(record, "error", dict)))
    if stage in ("proposal", "result"):
        take(record, "record", dict)
    if stage == "proposal":
        take_count(record, "oldest")
        take(record, "call", str)
