"""Restores what a run goes on from: all ranks the same snapshot, or they raise the same. The first rank decides, by what all have met.

Only what was stored and is not there as it was is passed over; what may pass is tried again; what does not fit is the caller's to change.
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
"""Of what may pass."""
PAUSE_SECONDS: Final = 5.0
"""Between two of them."""
PASS_OVER, AGAIN, STOP = b"pass over", b"again", b"stop"


class ResumeAttempt(NamedTuple):
    """One rank's side of it."""

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
        passed: list[str] = []
        tries = 0
        while True:
            chosen = self._choose(passed, drift)
            if chosen.is_new:
                return None
            if not chosen.address:
                break
            if chosen.drift:
                raise SnapshotMarkedBadError(
                    f'{chosen.drift}. A rank may be corrupted: compare the copies, then call resume(drift="accept") to go on from '
                    f'{chosen.address}, or resume(drift="skip") to go back to what was put before',
                    object_id=chosen.address,
                )
            found, failure = self._try(chosen.address)
            if found is not None:
                return found
            verdict = self._from_first(f"what becomes of the restore of {chosen.address!r}", partial(_verdict, failure))
            tries += 1
            if verdict == PASS_OVER:
                warnings.warn(f"{chosen.address} was passed over: {failure}", stacklevel=3)
                passed.append(chosen.address)
                tries = 0
            elif verdict == STOP or tries == TRIES:
                raise failure
            else:
                time.sleep(PAUSE_SECONDS)
        undefined = ", and what was tried has left the state undefined" if passed else ""
        raise CorruptObjectError(
            f"none of the snapshots of {self.ref!r} can be restored{undefined}: see the warnings, and run `tsck fsck --read-data`; a "
            "training that begins anew needs another ref",
            object_id=self.ref,
        )

    def note(self, found: Snapshot) -> dict[str, Any]:
        """What a snapshot knows of the run that put it: on all ranks what the first one reads, as they put the same from then on."""

        def read() -> bytes:
            info = self.store.engine.log.view().snapshot(parse_ulid(found.id) or b"")
            return json.dumps({} if info is None else note_of(self.store.engine, info)).encode()

        note: dict[str, Any] = json.loads(self._from_first(f"the notes of {found.root}", read))
        return note

    def _choose(self, passed: list[str], drift: OnDrift | None) -> ResumeCandidate:
        title = f"the resume of {self.ref!r} with drift={drift!r}, {len(passed)} passed over"
        told = self._from_first(title, lambda: json.dumps(choose(self.store, self.ref, passed, drift)).encode())
        return ResumeCandidate(*json.loads(told))

    def _try(self, address: str) -> tuple[Snapshot | None, StoreError]:
        """The snapshot, restored; or why it cannot be."""
        gone = NotFoundError(f"{address} was taken away meanwhile", object_id=address)
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
        """What the first rank says, told to all; tried again while the store or a rank does not answer."""

        def patiently() -> bytes:
            for _ in range(TRIES - 1):
                try:
                    return value()
                except RetryableError:
                    time.sleep(PAUSE_SECONDS)
            return value()

        if self.group is None:
            return patiently()
        return self.store.session.groups.broadcast(self.group, title, patiently, timeout_seconds=self.timeout_seconds)


def _verdict(failure: StoreError) -> bytes:
    """What all ranks do about a restore that failed."""
    if isinstance(failure, CorruptObjectError | MissingObjectError | SnapshotExpiredError):
        return PASS_OVER
    return AGAIN if isinstance(failure, RetryableError | NotFoundError) else STOP
