"""The save of the last completed step when an exception, Ctrl-C or SystemExit ends a run of transformers' Trainer.

Only while the state is between two steps: from the end of a step, with its logging and evaluation, until the next batches are read.
"""

from typing import Any

import torch.distributed as dist

from tensorstore_ck.errors import StoreError
from tensorstore_ck.integrations.trainer.attach import NativeNames, all_ranks


class ExceptionSaveMixin(NativeNames):
    """Part of `SnapshotMixin`, which saves."""

    _saves_on_exception = True
    _is_between_steps = False
    _saved_step: int | None = None

    @property
    def _group(self) -> "dist.ProcessGroup | None":
        """None: one process. A single rank of DeepSpeed is a group, since its parameters are partitioned."""
        return all_ranks(also_one=self._native.is_deepspeed_enabled)

    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        self._is_between_steps = False
        try:
            return super()._inner_training_loop(*args, **options)  # type: ignore[misc]
        except (Exception, KeyboardInterrupt, SystemExit) as exc:
            if self._saves_on_exception and self._is_between_steps and not isinstance(exc, StoreError) and options.get("trial") is None:
                exc.add_note(f"tensorstore_ck: {self._save_after_exception()}")
            raise

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        self._is_between_steps = False
        super()._run_epoch(*args, **options)  # type: ignore[misc]

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """See transformers."""
        self._is_between_steps = False
        return super().get_batch_samples(*args, **options)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        self._is_between_steps = True
        super()._maybe_log_save_evaluate(*args, **options)  # type: ignore[misc]

    def _save_after_exception(self) -> str:
        """Saves the last completed step, unless it was saved; returns the outcome as text."""
        native = self._native
        step = native.state.global_step
        if self._saved_step == step:
            return f"step {step}, the last completed one, was saved before"
        if self._group is not None:
            return f"step {step}, the last completed one, was not saved: the ranks of a group save together only"
        try:
            native._save_checkpoint(native.model, None)
            native._finish_saves()
        except Exception as exc:  # noqa: BLE001 - it must not replace the run's own
            return f"step {step}, the last completed one, was not saved: {type(exc).__name__}: {exc}"
        return f"step {step}, the last completed one, was saved"
