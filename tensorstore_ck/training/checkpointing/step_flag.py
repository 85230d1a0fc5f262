"""A flag that the ranks of a group share between collectives: that something is wanted, and the step from which it holds.

Any rank may ask; rank 0 chooses a step far enough ahead that all ranks read the flag before they reach it. Training keeps ranks within a
step or two of each other, since each waits for the others' gradients; a rank further ahead finds that the step has passed, and warns.
A poll is one call to the process group's own store, about 0.1 ms; no rank waits for another.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Final

from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import SnapshotAbortedError
from tensorstore_ck.session.group.channel import KeyValue, StoreRunner
from tensorstore_ck.training.checkpointing.triggers import DecidedTrigger

CALL_SECONDS: Final = 30.0
LONGEST_PAUSE_SECONDS: Final = 300.0
"""The longest pause between two polls of a flag that does not answer. Each poll can delay the training by `CALL_SECONDS`."""


class StepFlag:
    """One rank's view of the flags. All ranks poll at each step, with the same names."""

    def __init__(
        self, run: StoreRunner, renew: Callable[[], object], *, rank: int, prefix: str, lead_steps: int, clock: Callable[[], float]
    ) -> None:
        """`renew` repairs `run` after an error."""
        self._run, self._renew, self._prefix, self._lead_steps, self._clock = run, renew, prefix, lead_steps, clock
        self.is_first = rank == 0
        self._away_since: float | None = None
        self._again_at = 0.0
        self._trouble: Exception | None = None

    @property
    def away_seconds(self) -> float:
        """The seconds since the store last answered."""
        return 0.0 if self._away_since is None else self._clock() - self._away_since

    def poll(self, name: str, step: int, *, wants: bool) -> int | None:
        """The step from which `name` holds; None if rank 0 has not set it. `wants`: whether this rank asks for it.

        Raises:
            SnapshotAbortedError: the group's store does not answer, or did not a short time ago.
        """
        asked, since = f"{self._prefix}{name}/asked", f"{self._prefix}{name}/from"

        def talk(store: KeyValue) -> bytes | None:
            if self.is_first:
                if not store.check([since]) and (wants or store.check([asked])):
                    store.set(since, str(step + self._lead_steps).encode())
            elif wants and not store.check([asked]):
                store.set(asked, b"1")
            return store.get(since) if store.check([since]) else None

        if self._trouble is None or self._clock() >= self._again_at:
            try:
                answer = self._ask(talk)
            except (RuntimeError, OSError) as exc:  # torch's store errors are RuntimeErrors; time-outs are OSErrors
                self._trouble = exc
                self._away_since = self._clock() if self._away_since is None else self._away_since
                self._again_at = self._clock() + min(self.away_seconds, LONGEST_PAUSE_SECONDS)
            else:
                self._trouble = self._away_since = None
                return None if answer is None else int(answer)
        raise SnapshotAbortedError(f"the ranks cannot agree on when to save: {self._trouble}", object_id=name) from self._trouble

    def _ask(self, talk: Callable[[KeyValue], bytes | None]) -> bytes | None:
        """Retries once after a broken connection: a rank that misses one poll may learn too late from which step to save."""
        self._renew()
        try:
            return self._run(talk, CALL_SECONDS)
        except TimeoutError:
            raise
        except (RuntimeError, OSError):
            self._renew()
            return self._run(talk, CALL_SECONDS)


def poll_triggers(flag: StepFlag | None, triggers: Sequence[DecidedTrigger], saves: int, step: int) -> None:
    """Sets, on all ranks, the step from which each trigger fires. `saves`: the number of saves so far, equal on all ranks."""
    for number, trigger in enumerate(triggers):
        if trigger.since is not None:
            continue
        if flag is None:
            trigger.since = step if trigger.wants() else None
            continue
        wants = (trigger.any_rank or flag.is_first) and trigger.wants()
        try:
            trigger.since = flag.poll(f"{number}/{saves}", step, wants=wants)
        except SnapshotAbortedError as exc:
            warnings.warn(str(exc), stacklevel=user_stacklevel())
            continue
        if trigger.since is not None and trigger.since < step:
            warnings.warn(
                f"this rank is at step {step}, past step {trigger.since}, from which rank 0 wanted to save: make lead_steps larger than "
                "the distance between ranks",
                stacklevel=user_stacklevel(),
            )
