"""Where epochs of transformers' Trainer end, and where a resume begins in one, so that it repeats and leaves out nothing."""

from typing import Any

from transformers.trainer_utils import SaveStrategy, has_length

from tensorstore_ck.integrations.hf import trainer_values
from tensorstore_ck.integrations.hf.compatibility import RUN_EPOCH
from tensorstore_ck.integrations.trainer.pointers import read_pointer


class EpochsMixin:
    """Part of `SnapshotMixin`."""

    _values: dict[str, Any]
    _native: Any
    _ended_step = 0
    """The step after which the loop was last asked to log, evaluate and save."""
    _waits_for_epoch = False
    _passes = 0
    """Passes over data without a length before this run."""

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """A finished run is not continued: transformers would train one more step, if it has ended within an epoch."""
        state = self._native.state
        if state.global_step >= state.max_steps:
            return
        self._ended_step, self._waits_for_epoch = state.global_step, False
        given = {**dict(zip(RUN_EPOCH[1:], args, strict=False)), **options}
        if not has_length(given["train_dataloader"]):
            self._place_in_stream(given)
        super()._run_epoch(**given)  # type: ignore[misc]

    def _place_in_stream(self, given: dict[str, Any]) -> None:
        """Resumes in the right pass over data without a length: transformers skips the batches of all passes so far in the first."""
        if given["epoch"] == given["epochs_trained"]:
            folder = given["resume_from_checkpoint"]
            is_ours = folder is not None and read_pointer(folder) is not None
            self._passes, batches = trainer_values.place_in_stream(self._native, self._values) if is_ours else (0, None)
            given["epochs_trained"] += self._passes
            if batches is not None and not self._native.args.ignore_data_skip:
                given["steps_trained_in_current_epoch"] = batches
        given["epoch"] += self._passes

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """A save after the last step of an epoch waits for what is due at the epoch's end: a resume would leave that out."""
        state, control = self._native.state, self._native.control
        is_step, self._ended_step = state.global_step != self._ended_step, state.global_step
        if not is_step:
            control.should_save = control.should_save or self._waits_for_epoch
        is_due = is_step and control.should_save and self._native.args.save_strategy != SaveStrategy.BEST
        self._waits_for_epoch = is_due and (control.should_epoch_stop or control.should_training_stop or state.epoch == int(state.epoch))
        if self._waits_for_epoch:
            control.should_save = False
        super()._maybe_log_save_evaluate(*args, **options)  # type: ignore[misc]
