"""``TSCK_DEBUG=1``: the decisions of a command, as `tensorstore_ck` logs them at debug level, go to a file."""

import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import platformdirs

import tensorstore_ck
from tensorstore_ck.cli.output import say
from tensorstore_ck.errors import InvalidOptionError, StoreError
from tensorstore_ck.redaction import redacted

DEBUG_VARIABLE: Final = "TSCK_DEBUG"
_FORM: Final = "%(asctime)s.%(msecs)03d %(process)d %(threadName)s %(name)s: %(message)s"


@contextmanager
def debug_log() -> Iterator[None]:
    """Appends what the package logs to a file while the block runs, if the user asked for it, and names the file at the end.

    Raises:
        InvalidOptionError: the file cannot be written.
    """
    wanted = os.environ.get(DEBUG_VARIABLE, "")
    if wanted in ("", "0"):
        yield
        return
    path = platformdirs.user_state_path("tensorstore_ck", appauthor=False) / "debug.log" if wanted == "1" else Path(wanted)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise InvalidOptionError(f"{DEBUG_VARIABLE} names a file that cannot be written: {exc}", object_id=DEBUG_VARIABLE) from exc
    logger = logging.getLogger("tensorstore_ck")
    before = logger.level
    handler = logging.StreamHandler(os.fdopen(fd, "a", encoding="utf-8"))
    handler.setFormatter(_Redacted(_FORM, "%Y-%m-%d %H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.debug("tsck %s, Python %s", tensorstore_ck.__version__, platform.python_version())  # no arguments: they may be secrets
    try:
        yield
    except StoreError:
        logger.debug("the command failed", exc_info=True)
        raise
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.stream.close()
        say(f"tsck: what was decided, and why, is in {path}", err=True)


class _Redacted(logging.Formatter):
    """Leaves out secrets of URLs."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))
