"""Restores the snapshot from which a run resumes: all ranks the same one, or all raise the same error. The first rank decides.

Skips only missing or damaged snapshots, retries transient failures, and raises for snapshots that do not fit.
"""

import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tensorstore_ck.common.ids import parse_ulid
from tensorstore_ck.errors import (
    CorruptObjectError,
    InvalidOptionError,
    MissingObjectError,
    NotFoundError,
    RetryableError,
    SnapshotExpiredError,
    SnapshotMarkedBadError,
    StoreError,
)
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.advise import note_of
from tensorstore_ck.store import Store
from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.checkpointing.resume_candidates import OnDrift, ResumeCandidate, choose

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
TRIES: Final = 3
"""For transient failures."""
PAUSE_SECONDS: Final = 5.0
SKIP, RETRY, STOP = b"skip", b"retry", b"stop"


class ResumeAttempt(NamedTuple):
    """One rank's side of a resume."""

    store: Store
    state: object
    ref: str
    group: "ProcessGroup | None"
    timeout_seconds: float

    def restore(self, drift: OnDrift | None) -> Snapshot | None:
        """See `Checkpointer.resume`."""
        if drift not in (None, "accept", "skip"):
            raise InvalidOptionError(f'drift must be "accept" or "skip", not {drift!r}', object_id="drift")
        self.store.finish_staged(self.ref, self.group, timeout_seconds=self.timeout_seconds)
        skipped: list[str] = []
        tries = 0
        while True:
            chosen = self._choose(skipped, drift)
            if chosen.is_new:
                return None
            if not chosen.address:
                break
            if chosen.drift:
                raise SnapshotMarkedBadError(
                    f'{chosen.drift}. A rank may be corrupted: compare the copies, then call resume(drift="accept") to resume from '
                    f'{chosen.address}, or resume(drift="skip") to go back to an earlier snapshot',
                    object_id=chosen.address,
                )
            found, failure = self._try(chosen.address)
            if found is not None:
                return found
            verdict = self._from_first(f"the verdict on the restore of {chosen.address!r}", partial(_verdict, failure))
            tries += 1
            if verdict == SKIP:
                warnings.warn(f"{chosen.address} was skipped: {failure}", stacklevel=3)
                skipped.append(chosen.address)
                tries = 0
            elif verdict == STOP or tries == TRIES:
                raise failure
            else:
                time.sleep(PAUSE_SECONDS)
        undefined = ", and the attempts left the state undefined" if skipped else ""
        raise CorruptObjectError(
            f"none of the snapshots of {self.ref!r} can be restored{undefined}: see the warnings, and run `tsck fsck --read-data`; to "
            "start from the beginning, use another ref",
            object_id=self.ref,
        )

    def note(self, found: Snapshot) -> dict[str, Any]:
        """The notes about its run in a snapshot. All ranks get what the first one reads, since they will save it again."""

        def read() -> bytes:
            info = self.store.engine.log.view().snapshot(parse_ulid(found.id) or b"")
            return json.dumps({} if info is None else note_of(self.store.engine, info)).encode()

        note: dict[str, Any] = json.loads(self._from_first(f"the notes of {found.root}", read))
        return note

    def _choose(self, skipped: list[str], drift: OnDrift | None) -> ResumeCandidate:
        title = f"the resume of {self.ref!r} with drift={drift!r}, {len(skipped)} skipped"
        chosen = self._from_first(title, lambda: json.dumps(choose(self.store, self.ref, skipped, drift)).encode())
        return ResumeCandidate(*json.loads(chosen))

    def _try(self, address: str) -> tuple[Snapshot | None, StoreError]:
        """The restored snapshot; or None, and why it cannot be restored."""
        gone = NotFoundError(f"{address} was deleted meanwhile", object_id=address)
        try:
            if isinstance(self.state, TrainingState):
                found = self.state.restore(self.store, address, group=self.group, timeout_seconds=self.timeout_seconds)
                return found, gone
            return self.store.restoring(
                address, lambda found: found.checkout(into=self.state), group=self.group, timeout_seconds=self.timeout_seconds
            )[1], gone
        except StoreError as exc:
            return None, exc

    def _from_first(self, title: str, value: Callable[[], bytes]) -> bytes:
        """The first rank's value, on all ranks; retries transient failures."""

        def with_retries() -> bytes:
            for _ in range(TRIES - 1):
                try:
                    return value()
                except RetryableError:
                    time.sleep(PAUSE_SECONDS)
            return value()

        if self.group is None:
            return with_retries()
        return self.store.session.groups.broadcast(self.group, title, with_retries, timeout_seconds=self.timeout_seconds)


def _verdict(failure: StoreError) -> bytes:
    if isinstance(failure, CorruptObjectError | MissingObjectError | SnapshotExpiredError):
        return SKIP
    return RETRY if isinstance(failure, RetryableError | NotFoundError) else STOP
