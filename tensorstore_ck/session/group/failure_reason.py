"""Why an attempt came to nothing, as ranks tell each other: an error by its kind and its words, never by a pickle.

What would come again however often one tries is of the same class on all ranks: input errors, verified damage, a ref that another process
moved. All else means that the attempt was aborted, and that trying again may help.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tensorstore_ck.errors import BY_KIND, ConflictError, DamageError, InputError, SnapshotAbortedError, StoreError
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.session.group.rank_messages import MAX_TEXT, describe_ranks, error_text, shortened

LASTING: Final = (InputError, DamageError, ConflictError)
"""Of errors of several classes the first that is here counts: what a user must change helps, whatever else there is; and damage that was
verified stays, whatever else may pass."""
CLEAN: Final = "nothing needs to be cleaned up"


class FailureReason(NamedTuple):
    """In words for all ranks, and what class of error it is."""

    text: str
    kind: str = ""
    """Of a class that is among `LASTING`; empty: the attempt was aborted."""
    object_id: str = ""

    @classmethod
    def of_error(cls, exc: BaseException, *, by_name: bool = True) -> "FailureReason":
        """What is told of an error; `by_name`: its words begin with its class."""
        if not isinstance(exc, LASTING) or exc.kind not in BY_KIND:
            return cls(error_text(exc))
        return cls(error_text(exc) if by_name else shortened(str(exc), MAX_TEXT), exc.kind, exc.object_id)

    @classmethod
    def of_ranks(cls, said: Mapping[int, "FailureReason"], in_job: Sequence[int] | None = None) -> "FailureReason":
        """What several ranks say, as one: of the first class of `LASTING` that is there, and of its lowest rank."""
        first = min(said, key=lambda rank: (said[rank]._order(), rank))
        return said[first]._replace(text=describe_ranks({rank: each.text for rank, each in said.items()}, in_job))

    def _order(self) -> int:
        kind = BY_KIND.get(self.kind, SnapshotAbortedError)
        return next((at for at, each in enumerate(LASTING) if issubclass(kind, each)), len(LASTING))

    def record(self) -> Body:
        """As it travels."""
        return {"text": self.text, "kind": self.kind, "object": self.object_id}

    @classmethod
    def of_record(cls, record: Body) -> "FailureReason":
        """What `record` made.

        Raises:
            TypeError: it is none.
        """
        kind = take(record, "kind", str)
        return cls(
            take(record, "text", str),
            kind if issubclass(BY_KIND.get(kind, SnapshotAbortedError), LASTING) else "",
            take(record, "object", str),
        )

    @classmethod
    def of_outcome(cls, outcome: Body) -> "FailureReason | None":
        """Why nothing came of the attempt, if that is what all were told."""
        try:
            return cls.of_record(take(outcome, "abort", dict))
        except TypeError:
            return None

    def error(self, title: str, object_id: str) -> StoreError:
        """What every rank raises of an attempt with that title."""
        kind = BY_KIND.get(self.kind, SnapshotAbortedError)
        if issubclass(kind, SnapshotAbortedError):
            return kind(f"{title} was aborted: {self.text}; {CLEAN}, try again", object_id=object_id)
        how = "failed" if issubclass(kind, DamageError) else "was refused"
        return kind(f"{title} {how}: {self.text}; {CLEAN}", object_id=self.object_id or object_id)


class RankRefusedError(Exception):
    """Why an attempt cannot go on, which is no rank's own error; rank 0 raises it. Never leaves this package."""

    def __init__(self, reason: FailureReason) -> None:
        super().__init__(reason.text)
        self.reason = reason
