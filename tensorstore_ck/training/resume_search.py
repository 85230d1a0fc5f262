"""From which snapshot a run resumes: the one rule of `TrainingState.restore`, `Checkpointer.resume` and every trainer's adapter.

A branch stands for its newest snapshot that is neither marked nor damaged. A warning names each snapshot that is skipped, and the one that
is tried instead. A store that cannot be read now is no damage: after a few tries its error is raised. Any other address (``ref@step``,
``ref~n``, a tag, a root) means its snapshot and no other one.
"""

import json
import logging
import shlex
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.ids import SHOWN_ROOT_DIGITS
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import (
    CorruptObjectError,
    InvalidNameError,
    InvalidOptionError,
    MissingObjectError,
    NotFoundError,
    SnapshotExpiredError,
    SnapshotMarkedBadError,
    StoreError,
)
from tensorstore_ck.redaction import redacted
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS
from tensorstore_ck.training.rank_group import ask_first_rank
from tensorstore_ck.training.resume_candidates import OnDrift, ResumeCandidate, choose, find_named

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tensorstore_ck.store import ReadOnlyStore

T = TypeVar("T")
DAMAGES: Final = (CorruptObjectError, MissingObjectError, SnapshotExpiredError)
"""Errors for which a snapshot is skipped. When ranks restore together, all raise the same class."""
TRIES: Final = 3
"""The number of tries after transient failures."""
PAUSE_SECONDS: Final = 5.0
MAX_NAMED: Final = 4
_logger: Final = logging.getLogger("tensorstore_ck")


class ResumeSearch:
    """One search, on one rank; all ranks of the group make the same calls, and get the same answers."""

    def __init__(
        self,
        store: "ReadOnlyStore",
        address: str,
        group: "ProcessGroup | None",
        *,
        advice: str,
        missing: str = "",
        drift: OnDrift | None = None,
        allow_marked: bool = False,
        only_newest: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Finishes staged saves first.

        `advice` says how to accept a snapshot whose replicas had drifted apart, with ``{}`` for its address in quotes. `missing`: the
        error's text if there is nothing at the address; empty: a branch or tag may not exist yet. `only_newest`: take the newest snapshot
        of a branch or none. `drift`: see `Checkpointer.resume`; `allow_marked`: see `Store.checkout`.
        """
        if drift not in (None, "accept", "skip"):
            raise InvalidOptionError(f'drift must be "accept" or "skip", not {drift!r}', object_id="drift")
        self._store, self._address, self._group = store, address, group
        self._advice, self._missing = advice, missing
        self._drift, self._allow_marked, self._only_newest, self._timeout_seconds = drift, allow_marked, only_newest, timeout_seconds
        self._candidate = ResumeCandidate()
        self._skipped: dict[str, str] = {}
        self._warned = 0
        self._announced = ""
        self._tries = 0
        self._has_tried = False
        store.finish_staged(address, group, timeout_seconds=timeout_seconds)

    def restore(self, restore: Callable[[str], T]) -> T | None:
        """The result of `restore` for the first snapshot that it can restore; None if there is no such branch or tag yet.

        `restore` restores the snapshot at an address, on all ranks or on none.

        Raises:
            NotFoundError: the step, ancestor or root does not exist.
            SnapshotMarkedBadError: replicas had drifted apart, so that the user must choose.
            CorruptObjectError: none of the branch's snapshots can be restored.
            StoreError: what `restore` raised, if this is no damage, or the address names one snapshot.
        """
        while (address := self.next_address()) is not None:
            try:
                return restore(address)
            except StoreError as exc:
                self.note_failure(exc)
        return None

    def next_address(self, *, announce: bool = True) -> str | None:
        """The snapshot to try next; None if there is no such branch or tag yet. One line of the log says which, unless the caller named it.

        `announce`: false if the caller does not restore it. Raises `StoreError`: see `restore`.
        """
        self._candidate = chosen = self._from_first()
        self._skipped |= dict(chosen.skipped)
        if chosen.is_new and self._missing:
            raise NotFoundError(self._missing, object_id=self._address)
        if chosen.is_new:
            if announce and not self._only_newest:
                self._announce(f"nothing to resume: {self._address} has no snapshot yet")
            return None
        if not chosen.address:
            raise self._none_intact()
        if chosen.drift:
            raise SnapshotMarkedBadError(
                f"{chosen.drift}. A rank may be corrupted: compare the copies, then {self._advice.format(repr(chosen.name))}",
                object_id=chosen.name,
            )
        self._warn_of_skipped(chosen.name)
        if announce and not chosen.is_named:
            self._announce(f"resuming from {chosen.name} (root {chosen.root[:SHOWN_ROOT_DIGITS]})")
        return chosen.address

    def note_failure(self, failure: StoreError) -> None:
        """Notes that the snapshot of `next_address` could not be restored; returns if there is another to try.

        Raises:
            StoreError: `failure`.
        """
        if self._candidate.is_named:
            raise failure
        if isinstance(failure, DAMAGES):
            self._has_tried = True
            self.skip(str(failure))
        elif (failure.retry == "same" or isinstance(failure, NotFoundError)) and self._tries + 1 < TRIES:
            self._tries += 1  # not found: the snapshot was deleted meanwhile
            time.sleep(PAUSE_SECONDS)
        else:
            raise failure

    def skip(self, reason: str) -> None:
        """Skips the snapshot of `next_address`."""
        self._skipped[self._candidate.name] = reason
        self._tries = 0

    def _from_first(self) -> ResumeCandidate:
        """The first rank's choice."""
        title = f"the resume from {self._address!r}, {len(self._skipped)} skipped"
        choose_here = partial(with_retries, lambda: json.dumps(self._choose()).encode())
        try:
            answer = ask_first_rank(self._store, self._group, title, choose_here, timeout_seconds=self._timeout_seconds)
        except (InvalidNameError, NotFoundError) as exc:
            if not self._missing:
                raise
            raise NotFoundError(f"{self._missing}: {exc}", object_id=self._address) from exc
        return ResumeCandidate(*parse_json(answer))

    def _choose(self) -> ResumeCandidate:
        if self._only_newest:
            return find_named(self._store, self._address)
        return choose(self._store, self._address, self._skipped, drift=self._drift, allow_marked=self._allow_marked)

    def _announce(self, text: str) -> None:
        """Logs the text once, on the first rank. It is a warning, as for a new store, so that most jobs' logs show whether the job does
        what its user expects.
        """
        if text != self._announced and (self._group is None or self._group.rank() == 0):
            _logger.warning("%s in %s", text, redacted(self._store.url))
        self._announced = text

    def _warn_of_skipped(self, taken: str) -> None:
        for name, reason in list(self._skipped.items())[self._warned :]:
            warnings.warn(f"{name} was skipped: {reason}; resuming from {taken} instead", stacklevel=user_stacklevel())
        self._warned = len(self._skipped)

    def _none_intact(self) -> CorruptObjectError:
        undefined = ", and the attempts left the state undefined" if self._has_tried else ""
        reasons = [f"{name}: {reason}" for name, reason in self._skipped.items()]
        more = f"; and {len(reasons) - MAX_NAMED} more" if len(reasons) > MAX_NAMED else ""
        return CorruptObjectError(
            f"none of the snapshots of {self._address!r} can be restored{undefined}: {'; '.join(reasons[:MAX_NAMED])}{more}. Run "
            f"`tsck fsck --read-data -s {shlex.quote(self._store.url)}`; to start from the beginning, use another ref",
            object_id=self._address,
        )


def with_retries(value: Callable[[], T]) -> T:
    """The result of `value`; retries after transient failures."""
    for _ in range(TRIES - 1):
        try:
            return value()
        except StoreError as exc:
            if exc.retry != "same":
                raise
            time.sleep(PAUSE_SECONDS)
    return value()
