"""What happens to puts under way when the process ends without having closed its store."""

import logging
import os
import threading
import weakref
from typing import Final

from tensorstore_ck.session.save.save_queue import EXIT_SECONDS, SaveQueue

_logger: Final = logging.getLogger("tensorstore_ck")


def finish_at_exit(saver: SaveQueue) -> None:
    """Has the interpreter wait for the puts of `saver` before it ends; what is not published then is said."""
    found, pid = weakref.ref(saver), os.getpid()

    def finish() -> None:
        saver = found()
        if saver is None or os.getpid() != pid:  # a forked child's end is not the puts' business, nor are its locks
            return
        saver.leave_resumed()
        report = saver.drain(EXIT_SECONDS)
        if report.dropped or report.under_way:
            _logger.error("the process ends with puts under way: %s", report)

    # Not atexit: its callbacks come when executors take no work any more, and backends use those.
    threading._register_atexit(finish)  # type: ignore[attr-defined]
