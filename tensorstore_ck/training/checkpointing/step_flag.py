"""What the ranks of a group tell each other between collectives: that something is wanted, and from which step it counts.

Any rank may ask; rank 0 says from which step on, so many steps ahead that all ranks read it before they get there. Training keeps ranks
within a step or two of each other, as each waits for the others' gradients; one that is further ahead finds the step passed, and says so.
A look at the flag is one call to the store that the process group has anyway, some 0.1 ms; no rank waits for another one.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Final

from tensorstore_ck.errors import SnapshotAbortedError
from tensorstore_ck.session.group.channel import KeyValue, StoreRunner
from tensorstore_ck.training.checkpointing.triggers import DecidedTrigger

CALL_SECONDS: Final = 30.0
LONGEST_PAUSE_SECONDS: Final = 300.0
"""Between two looks at a flag that does not answer: each can take `CALL_SECONDS` of the training."""


class StepFlag:
    """One rank's view of it. All ranks look at each step, with the same names."""

    def __init__(
        self, run: StoreRunner, renew: Callable[[], object], *, rank: int, prefix: str, lead_steps: int, clock: Callable[[], float]
    ) -> None:
        """`renew` mends `run` after an error."""
        self._run, self._renew, self._rank, self._prefix, self._lead_steps, self._clock = run, renew, rank, prefix, lead_steps, clock
        self._away_since: float | None = None
        self._again_at = 0.0
        self._trouble: Exception | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    @property
    def away_seconds(self) -> float:
        """For how long it has not answered."""
        return 0.0 if self._away_since is None else self._clock() - self._away_since

    def poll(self, name: str, step: int, *, wants: bool) -> int | None:
        """From which step on `name` counts; None while nobody has said. `wants`: whether this rank asks for it.

        Raises:
            SnapshotAbortedError: the store of the group does not answer; or did not when it was asked last, a short time ago.
        """
        asked, said = f"{self._prefix}{name}/asked", f"{self._prefix}{name}/from"

        def talk(store: KeyValue) -> bytes | None:
            if self._rank == 0:
                if not store.check([said]) and (wants or store.check([asked])):
                    store.set(said, str(step + self._lead_steps).encode())
            elif wants and not store.check([asked]):
                store.set(asked, b"1")
            return store.get(said) if store.check([said]) else None

        if self._trouble is None or self._clock() >= self._again_at:
            try:
                found = self._ask(talk)
            except (RuntimeError, OSError) as exc:  # torch's store errors are RuntimeErrors; time-outs are OSErrors
                self._trouble = exc
                self._away_since = self._clock() if self._away_since is None else self._away_since
                self._again_at = self._clock() + min(self.away_seconds, LONGEST_PAUSE_SECONDS)
            else:
                self._trouble = self._away_since = None
                return None if found is None else int(found)
        raise SnapshotAbortedError(f"the ranks cannot agree on when to save: {self._trouble}", object_id=name) from self._trouble

    def _ask(self, talk: Callable[[KeyValue], bytes | None]) -> bytes | None:
        """Once more where the connection turns out to be broken: a rank that does not look at one step may miss from when on to save."""
        self._renew()
        try:
            return self._run(talk, CALL_SECONDS)
        except TimeoutError:
            raise
        except (RuntimeError, OSError):
            self._renew()
            return self._run(talk, CALL_SECONDS)


def poll_triggers(flag: StepFlag | None, told: Sequence[DecidedTrigger], saves: int, step: int) -> None:
    """What one rank decides, told to all: from when on each trigger counts. `saves`: how many there were, which is the same on all."""
    for number, each in enumerate(told):
        if each.since is not None:
            continue
        if flag is None:
            each.since = step if each.wants() else None
            continue
        wants = (each.any_rank or flag.is_first) and each.wants()
        try:
            each.since = flag.poll(f"{number}/{saves}", step, wants=wants)
        except SnapshotAbortedError as exc:
            warnings.warn(str(exc), stacklevel=3)
            continue
        if each.since is not None and each.since < step:
            warnings.warn(
                f"this rank is at step {step}, past step {each.since}, from which rank 0 wanted to save: make lead_steps larger than "
                "ranks are apart",
                stacklevel=3,
            )
