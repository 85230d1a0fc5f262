"""What the caller of an attempt does in it."""

from collections.abc import Callable
from typing import NamedTuple

from tensorstore_ck.format.sealed import Body


class Participant(NamedTuple):
    """What the caller does in an attempt. Records are small maps of what msgpack has; an error that one raises ends the attempt."""

    propose: Callable[[], Body]
    """What this rank is about to do."""
    execute: Callable[[Body], Body]
    """Does this rank's part, durably, and says what came of it; gets the record of `compare`."""
    resolve: Callable[[str], Body | None] | None
    """Has the log say "abort" unless it says "put" already; the outcome's record if put, None if aborted. The reason is for people.
    None for what leaves nothing in the log."""
    compare: Callable[[list[Body]], Body | str]
    """On rank 0, with the proposals of all ranks in order: what to tell all; or, in words, why their states cannot be one. An input error
    that it raises is that of all ranks, whatever it is about."""
    commit: Callable[[list[Body]], Body]
    """On rank 0, with what came of the work of all ranks, in order: appends the put to the log; the outcome's record."""
