"""The steps of a rank in a round of its group."""

from collections.abc import Callable
from typing import NamedTuple, NoReturn, Self

from tensorstore_ck.format.sealed import Body


class Participant(NamedTuple):
    """The caller's steps in a round. Records are small maps of msgpack types. An error in any of the steps ends the round."""

    propose: Callable[[], Body]
    """Returns this rank's proposal: what it is about to do."""
    execute: Callable[[Body], Body]
    """Does this rank's part, durably; gets the record of `compare`, returns the result."""
    resolve: Callable[[str], Body | None] | None
    """Appends "abort" to the log, with a reason for people, unless it says "put" already; the outcome's record if put, None if aborted.
    None for rounds that leave nothing in the log."""
    compare: Callable[[list[Body]], Body | str]
    """On rank 0, with the proposals of all ranks in order: the answer to all; or, as text, why their states do not fit together. All ranks
    raise an input error that it raises."""
    commit: Callable[[list[Body]], Body]
    """On rank 0, with the results of all ranks, in order: appends the save to the log; returns the outcome's record."""
    begins_rounds: bool = False
    """`execute` begins rounds: a rank that sees answer and outcome at once executes too, to count rounds as the others do."""

    @classmethod
    def failed(cls, error: BaseException, resolve: Callable[[str], Body | None] | None) -> Self:
        """A rank that cannot take part: its error is its proposal, and ends the round on all ranks."""

        def refuse(*_: object) -> NoReturn:
            raise error

        return cls(propose=refuse, execute=refuse, resolve=resolve, compare=refuse, commit=refuse)
