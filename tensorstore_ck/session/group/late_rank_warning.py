"""Warns which ranks are missing, long before the wait for them ends. Nothing else shows that one rank alone made a call for all ranks."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, NamedTuple

from tensorstore_ck.session.group.rank_messages import named_ranks

LATE_SECONDS: Final = 10.0
"""The time that rank 0 waits for the others before it warns."""
ASK_SECONDS: Final = 12.0
"""The time that the others wait for rank 0 before they warn. By then rank 0 has warned, if it waits itself."""
_PACKAGE: Final = __name__.partition(".")[0]
_THREADS: Final = ("threading", "concurrent.futures.thread")
_logger: Final = logging.getLogger(_PACKAGE)


class Wait(NamedTuple):
    """The call in which a rank waits."""

    title: str
    rank: int
    ranks: int
    timeout: float
    in_job: Sequence[int] | None
    elsewhere: Callable[[Sequence[int]], str] = lambda _: ""
    """Says for a message which of the ranks was last in another store, or in an earlier opening of it; empty if none is known to be."""

    def report(self, missing: Sequence[int], seconds: float) -> None:
        """Logs a warning that this rank has waited for `seconds` for the `missing` ones."""
        own, others, call = named_ranks([self.rank], self.in_job), named_ranks(missing, self.in_job), _call(sys._getframe())
        where = f"{call} ({self.title})" if call else self.title
        maybe = " It may itself wait for other ranks." if self.rank else ""
        text = f"{own} has waited {seconds:.0f} s for {others} in {where}, which all {self.ranks} ranks must call; it fails after"
        _logger.warning("%s %.0f s.%s%s", text, self.timeout, maybe, self.elsewhere(missing))


def _call(frame: FrameType | None) -> str:
    """The user's call on this thread, with its line; empty on a thread of this package."""
    name = ""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        name = frame.f_code.co_qualname.removesuffix(".__init__").rpartition(".")[2]
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") in _THREADS:
        return ""
    return f"{name}() at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
