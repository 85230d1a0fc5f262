"""The highest entry of a log that this process and others of its user have seen, to notice a log that goes back or forks.

It is kept in a `HeadFile`; without one this process knows only what it saw itself. This module does not access the log: `Follower` reports
what it found.
"""

import shlex
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal

from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import InvalidOptionError, LogChangedError
from tensorstore_ck.log.head_file import HeadFile, SeenHead
from tensorstore_ck.log.table_rows import Head

Rollback = Literal["warn", "error"]
ROLLBACK: Final[tuple[Rollback, ...]] = ("warn", "error")

SAVE_SECONDS: Final = 10.0
"""A process saves the head that it appended at most this often, and when it closes the store."""
_ACCEPT_TRIES: Final = 50
_REPLACED: Final = "is another one now"


class LogChangedWarning(UserWarning):
    """The log does not continue what this host read earlier: the store was restored from a copy, or entries were destroyed or replaced."""


class Watermark:
    """The highest entry seen. Callers use `last_seen` before they follow the log, `check` after, and `appended` for their own entries."""

    def __init__(
        self,
        file: HeadFile | None = None,
        *,
        log: str = "log",
        rollback: Rollback = "warn",
        url: str = "",
        identity: int = 0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log` is the prefix in store.json; `rollback`: whether a changed log is an error.

        `url` and `identity` (of its folder; 0: none) say where the store is: a copy of its files elsewhere may have another log.

        Raises:
            InvalidOptionError: an unknown `rollback`.
        """
        if rollback not in ROLLBACK:
            raise InvalidOptionError(f"rollback must be 'warn' or 'error', not {rollback!r}", object_id="rollback")
        self._file = file
        self._log = log
        self.rollback = rollback
        self._url = url
        self._identity = identity
        self._monotonic = monotonic
        self._head: Head | None = None
        self._on_file: SeenHead | None = None
        self._has_looked = False
        self._has_saved = False
        self._has_appended = False
        self._next_save = 0.0
        self._lost: Head | None = None
        """An entry that was seen and that the log no longer has, until a user accepts that."""
        self._other_log: SeenHead | None = None
        """The entry that was seen of the store's former log, if store.json names another log now; until a user accepts that."""
        self._reported: Head | None = None

    @property
    def is_changed(self) -> bool:
        """Whether the log went back, was forked or replaced, and nobody has accepted that yet."""
        return self._lost is not None or self._other_log is not None

    def seen_elsewhere(self) -> str:
        """Which store has the entries that this user has seen, if it may not be this one; empty: it is this one, or unknown."""
        known = self._known
        if known is None or not known.url:
            return ""
        if known.url != self._url:
            return f"that this user has seen at {known.url}"
        is_other = bool(known.identity and self._identity and known.identity != self._identity)
        return "that this user has seen here, in another folder" if is_other else ""

    def last_seen(self) -> Head | None:
        """The highest entry seen. Call it before the log is read: later it may include a newer entry."""
        if self._file is None or (self._has_looked and not self.is_changed):
            return self._head
        contents = self._file.read()
        if not self._has_looked:
            self._has_looked, self._on_file = True, contents
            if contents is not None and contents.log != self._log:
                self._other_log = contents
            elif contents is not None and (self._head is None or contents.head.n >= self._head.n):
                self._head = contents.head
        elif contents is not None and (self._on_file is None or contents.accepted_ns != self._on_file.accepted_ns):
            self._on_file, self._lost, self._other_log = contents, None, None
            if contents.log == self._log:
                self._head = contents.head
            else:
                self._other_log = contents
        return self._head

    def is_news(self, head: Head, name: str) -> bool:
        """Whether `check` has to report that `head`, up to which the host's cache was folded, is not in the log.

        Raises:
            LogChangedError: with ``rollback="error"``: before the cache, which may be the only evidence, is emptied.
        """
        known = self._known
        is_dismissed = known is not None and head.n <= known.dismissed_n
        if not is_dismissed and self.rollback == "error":
            self._report_lost(head, name, "is gone, or another one now")
        return not is_dismissed

    def check(self, lost: Head | None, head: Head, name_of: Callable[[int], str]) -> None:
        """The log was followed to `head`. `lost`: the highest entry that was seen before and that the log does not have any more.

        Raises:
            LogChangedError: there is one, with ``rollback="error"``.
        """
        if lost is not None:
            self._report_lost(lost, name_of(lost.n), f"is gone: the log ends at {head.n}" if lost.n > head.n else _REPLACED)
            if self._file is None:  # nobody can accept it
                self._lost, self._head = None, head
            return
        self._lost, self._head = None, head
        if self._other_log is not None:
            self._report_other_log(self._other_log)
        elif not self._has_saved or (self._has_appended and self._monotonic() >= self._next_save):
            self._save()

    def appended(self, head: Head) -> None:
        """This process added an entry."""
        self._has_appended = True
        if self._lost is None:
            self._head = head
            if self._other_log is None and self._monotonic() >= self._next_save:
                self._save()

    def close(self) -> None:
        """Saves the head that this process appended."""
        if self._has_appended and not self.is_changed:
            self._save()

    def accept(self, head: Head, now_ns: int) -> Head | None:
        """Accepts the log up to `head`, on a user's request. Returns the entry that it had lost; None if nothing was wrong.

        Raises:
            InvalidOptionError: the file cannot be written.
        """
        lost = self._lost or (self._other_log.head if self._other_log is not None else None)
        if lost is None or self._file is None:
            return None
        before, why = self._on_file, "another process writes it"
        for _ in range(_ACCEPT_TRIES):
            dismissed = [0 if self._lost is None else self._lost.n]
            if before is not None and before.log == self._log:
                dismissed += [before.dismissed_n, before.head.n]
            new = SeenHead(head=head, accepted_ns=now_ns, dismissed_n=max(dismissed), log=self._log, url=self._url, identity=self._identity)
            try:
                before = self._file.swap(before, new)
            except OSError as exc:
                why = str(exc)
                break
            if before == new:
                self._on_file, self._head, self._lost, self._other_log = new, head, None, None
                return lost
            time.sleep(0.1)
        raise InvalidOptionError(f"{self._file.path} cannot be written ({why})", object_id="state_dir")

    def _save(self) -> None:
        """Saves the head if it is higher. If another process saved a head meanwhile, keeps that one; the next refresh checks it."""
        if self._file is None or self._head is None or self._head.n <= (self._known.head.n if self._known is not None else 0):
            self._has_saved = True
            return
        self._has_saved, self._next_save = True, self._monotonic() + SAVE_SECONDS
        new = self._with(self._head)._replace(url=self._url, identity=self._identity)
        with suppress(OSError):  # the home may be full, read-only or another user's: then nothing is saved
            contents = self._file.swap(self._on_file, new)
            if contents is not None and contents.log != self._log:
                self._other_log = contents
            elif contents is not None and contents not in (self._on_file, new):
                self._head = contents.head
            self._on_file = contents

    def _report_lost(self, head: Head, name: str, what: str) -> None:
        """Reports that the entry `head`, which was seen, is not in the log."""
        self._lost = head
        if self._head is None or head.n > self._head.n:
            self._head = head
        is_higher = head.n > (self._known.head.n if self._known is not None else 0)
        if self._file is not None and self._other_log is None and is_higher:
            with suppress(OSError):  # so that every command reports it
                known = self._with(head)
                if self._file.swap(self._on_file, known) == known:
                    self._on_file = known
        where, elsewhere = shlex.quote(self._url), self.seen_elsewhere()
        if elsewhere:
            message = (
                f"{self._url}: log entry {name} {what}: this store is a copy of the one {elsewhere}, or was restored or moved. If both are "
                f"used, give this one an identity of its own with `tsck adopt -s {where}`; else accept its log with "
                f"`tsck accept-log -s {where}`"
            )
        else:
            worse = "it was replaced or forged" if what == _REPLACED else "entries were destroyed"
            message = (
                f"{self._url}: log entry {name} {what}, though this user has seen it here. If the store was restored from a "
                f"copy, check its contents (`tsck log -s {where}`), and accept it with `tsck accept-log -s {where}`. If not, {worse}: "
                "restore the log from a copy"
            )
        self._report(head, message, name)

    def _report_other_log(self, other: SeenHead) -> None:
        where = shlex.quote(self._url)
        message = (
            f"{self._url}: store.json names the log {self._log}, and this user has seen the log {other.log} of this store, up to entry "
            f"{other.head.n}. If somebody ran `tsck salvage`, check its contents (`tsck log -s {where}`), and accept it with "
            f"`tsck accept-log -s {where}`. If not, store.json was replaced: restore it from a copy"
        )
        self._report(other.head, message, "store.json")

    def _report(self, head: Head, message: str, object_id: str) -> None:
        if self.rollback == "error":
            raise LogChangedError(message, object_id=object_id)
        if self._reported != head:
            self._reported = head
            warnings.warn(LogChangedWarning(message), stacklevel=user_stacklevel())

    @property
    def _known(self) -> SeenHead | None:
        """The file's contents, if they are of this log."""
        return self._on_file if self._on_file is not None and self._on_file.log == self._log else None

    def _with(self, head: Head) -> SeenHead:
        return self._known._replace(head=head) if self._known is not None else SeenHead(head, log=self._log)
