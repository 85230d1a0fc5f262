"""The save of the last completed step when an exception, Ctrl-C or SystemExit ends a loop; and what the exception says about it.

A state that a step has begun to change is never saved. Ranks of a group do not save: the others may be gone, or in the middle of a step.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.step_watch import UnknownStateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CAUSE = "on_exception"
"""The trigger of such a snapshot."""


class ExceptionSave:
    """The save of one loop. `Checkpointer` calls all methods but `end` in `step`, and before and after the loop."""

    def __init__(self, state: object, ref: str, group: "ProcessGroup | None") -> None:
        self._ref = ref
        self._why = "the ranks of a group save together only" if group is not None else "the state is no TrainingState"
        self._watch = state.step_watch() if group is None and isinstance(state, TrainingState) else None
        self._step: int | None = None
        self._saved: int | None = None

    def begin_step(self) -> None:
        """Notes that `Checkpointer.step` begins; if that raises, nothing is saved."""
        self._step = None

    def end_step(self, step: int, *, is_saved: bool) -> None:
        """Notes that a step was completed, and whether it was saved."""
        self._step, self._saved = step, step if is_saved else self._saved
        if self._watch is not None:
            self._watch.note()

    def end(self, error: BaseException | None, put: Callable[[object], object]) -> None:
        """Ends the watch of the loop. If `error` ended it and the last completed step was not saved, saves that step by `put`, and notes
        that on `error`.
        """
        try:
            if isinstance(error, Exception | KeyboardInterrupt | SystemExit) and self._step not in (None, self._saved):
                error.add_note(f"tensorstore_ck: {self._save(put)}")
        finally:
            if self._watch is not None:
                self._watch.close()

    def _save(self, put: Callable[[object], object]) -> str:
        step, ref = self._step, self._ref
        try:
            if self._watch is None:
                raise UnknownStateError(self._why)
            put(self._watch.state())
        except UnknownStateError as exc:
            why = str(exc)
        except Exception as exc:  # noqa: BLE001 - it must not replace the loop's own
            why = f"{type(exc).__name__}: {exc}"
        else:
            return f"step {step}, the last completed one, was saved as {ref}@{step}"
        last = "nothing was saved before" if self._saved is None else f"the last save was of step {self._saved}"
        return f"step {step}, the last completed one, was not saved to {ref!r}: {why}; {last}"
