"""What the ranks of a group tell each other between collectives: that something is wanted, and from which step it counts.

Any rank may ask; rank 0 says from which step on, so many steps ahead that all ranks read it before they get there. Training keeps ranks
within a step or two of each other, as each waits for the others' gradients; one that is further ahead finds the step passed, and says so.
A look at the board is one call to the store that the process group has anyway, some 0.1 ms; no rank waits for another one.
"""

from typing import Final

from tensorstore_ck.errors import SnapshotAbortedError
from tensorstore_ck.ranks.channel import KeyValue, Runner

CALL_SECONDS: Final = 30.0


class Board:
    """One rank's view of it. All ranks look at each step, with the same names."""

    def __init__(self, run: Runner, *, rank: int, prefix: str, lead_steps: int) -> None:
        self._run, self._rank, self._prefix, self._lead_steps = run, rank, prefix, lead_steps

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    def look(self, name: str, step: int, *, wants: bool) -> int | None:
        """From which step on `name` counts; None while nobody has said. `wants`: whether this rank asks for it.

        Raises:
            SnapshotAbortedError: the store of the group does not answer, or this rank is past the step.
        """
        asked, said = f"{self._prefix}{name}/asked", f"{self._prefix}{name}/from"

        def talk(store: KeyValue) -> bytes | None:
            if self._rank == 0:
                if not store.check([said]) and (wants or store.check([asked])):
                    store.set(said, str(step + self._lead_steps).encode())
            elif wants and not store.check([asked]):
                store.set(asked, b"1")
            return store.get(said) if store.check([said]) else None

        try:
            found = self._run(talk, CALL_SECONDS)
        except (RuntimeError, OSError) as exc:  # torch's store errors are RuntimeErrors; time-outs are OSErrors
            raise SnapshotAbortedError(f"the ranks cannot agree on when to save: {exc}", object_id=name) from exc
        return None if found is None else int(found)
