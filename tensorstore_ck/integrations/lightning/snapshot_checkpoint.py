"""`SnapshotCheckpoint`: Lightning's ModelCheckpoint, which saves into a store. `SnapshotMixin` does the same for subclasses.

ModelCheckpoint decides when to save, which checkpoints are the best and how their files are called. Here the files are pointers, and all
that it asks for at one time is one snapshot: `last.ckpt` and the best one name the same.

Lightning cannot continue exactly from a save that comes before an evaluation or the end of an epoch which the same batch causes: it skips
them after a resume. Such saves wait until these have ended. Saves between two batches of one step wait for the step.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import proxy

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, StoreError
from tensorstore_ck.integrations.lightning.compatibility import require_supported
from tensorstore_ck.integrations.lightning.lightning_state import require_storable, training_state
from tensorstore_ck.integrations.lightning.pointer_files import FILES, read_pointer
from tensorstore_ck.integrations.lightning.snapshot_resume import FITTING, OpenedStore, SnapshotResume
from tensorstore_ck.integrations.trainer.attach import NativeNames, all_ranks
from tensorstore_ck.integrations.trainer.pointers import NamedSaves
from tensorstore_ck.integrations.trainer.saves import Always, require_own_ref
from tensorstore_ck.log.field_checks import validate_ref_name
from tensorstore_ck.log.retention import Policy
from tensorstore_ck.store import Store
from tensorstore_ck.training.checkpointing import Checkpointer, Trigger
from tensorstore_ck.training.checkpointing.triggers import DecidedTrigger, TriggerContext


class _FilesNamedFirst(Trigger):
    """The user's trigger: ModelCheckpoint names files and notes the best before a save, since its notes are saved with the rest."""

    def __init__(self, when: Trigger, asked: list[str], name_files: Callable[[], None]) -> None:
        """`asked`: files for which ModelCheckpoint wants a save in any case."""
        self._when, self._asked, self._name_files = when, asked, name_files
        self._fired = False

    def fires(self, moment: TriggerContext) -> bool:
        self._fired = self._when.fires(moment)
        if self._fired and not self._asked:
            self._name_files()
        return self._fired or bool(self._asked)

    def causes(self) -> Iterator[str]:
        return self._when.causes() if self._fired else iter(())

    def saved(self, moment: TriggerContext) -> None:
        self._when.saved(moment)

    def decided(self) -> Iterator[DecidedTrigger]:
        return self._when.decided()


def _newest_metrics(trainer: Any) -> dict[str, float]:
    """The newest value of each metric that is one number."""
    numbers = {name: value for name, value in trainer.callback_metrics.items() if isinstance(value, Tensor) and value.numel() == 1}
    return {name: float(value) for name, value in numbers.items()}


def _epoch_of(trainer: Any) -> float:
    """The number of epochs that have ended, with the part of the present one."""
    progress, batches = trainer.fit_loop.epoch_progress.current, trainer.num_training_batches
    is_within = progress.ready > progress.processed and batches not in (0, float("inf"))
    share = trainer.fit_loop.epoch_loop.batch_progress.current.ready / batches if is_within else 0.0
    return float(progress.processed) + min(share, 1.0)


@short_errors
class SnapshotMixin(NativeNames):
    """Makes a subclass of ModelCheckpoint save into a store.

    ``class MyCheckpoint(tsck.lightning.SnapshotMixin, lightning.pytorch.callbacks.ModelCheckpoint)``; or that of `pytorch_lightning`.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        ref: str,
        *,
        when: Trigger | None = None,
        keep: Mapping[str, Any] | None = None,
        asynchronous: bool = True,
        **options: Any,
    ) -> None:
        """All arguments but these go to ModelCheckpoint, and keep their meaning.

        Args:
            store: The store; or its URL or path, where it is created if there is none.
            ref: The branch.
            when: When to save, instead of ModelCheckpoint's arguments for that: evaluated after each step.
            keep: The retention policy of the ref, as in `Store.set_policy`; by default it follows from `save_top_k`.
            asynchronous: Save in the background.
            options: For ModelCheckpoint.

        Raises:
            InvalidOptionError: `when` is no trigger, ModelCheckpoint is given a moment as well, or `keep` is no valid policy.
            InvalidNameError: `ref` is no valid name.
        """
        validate_ref_name(ref)
        if keep is not None:
            Policy.of_rules(keep)
        if when is not None:
            given = [name for name in ("every_n_train_steps", "every_n_epochs", "train_time_interval") if options.get(name) is not None]
            if given or not isinstance(when, Trigger):
                what = f"pass when= or {given[0]}=, not both" if given else f"when must be a trigger, not {when!r}"
                raise InvalidOptionError(what, object_id="when")
            options |= {"every_n_train_steps": 0, "every_n_epochs": 0}
        super().__init__(**options)
        self._opened, self._ref, self._when, self._keep, self._asynchronous = OpenedStore(store), ref, when, keep, asynchronous
        self._checkpointer: Checkpointer | None = None
        self._asked: list[str] = []
        self._waits = self._postponed = self._is_naming = False
        self._step_seen = -1
        self._named = NamedSaves(FILES)
        self._resume = SnapshotResume(self._opened, ref)

    @property
    def _store(self) -> Store:
        return self._opened.get()

    def __getstate__(self) -> dict[str, Any]:
        """For a Strategy that starts processes, and for a module that is pickled with its Trainer."""
        return {**vars(self), "_checkpointer": None, "_named": NamedSaves(FILES)}

    # --- start and resume ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See ModelCheckpoint.

        Raises:
            MissingExtraError: Lightning has another version than those that are supported.
            InvalidOptionError: the strategy is not supported, or another callback saves to the same ref.
            UnsupportedValueError: a hyperparameter cannot be stored.
        """
        require_supported(trainer)
        super().setup(trainer, pl_module, stage)  # type: ignore[misc]
        others = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, SnapshotMixin) and callback is not self]
        if any((callback._store.url, callback._ref) == (self._store.url, self._ref) for callback in others):
            raise InvalidOptionError(f"two callbacks save to {self._ref!r}: give each a ref of its own", object_id=self._ref)
        self._resume.install(trainer)
        if stage == FITTING:
            self._resume.begin(trainer)
            self._checkpointer = None
            self._waits = self._postponed = self._is_naming = False
            self._asked, self._step_seen = [], -1
            for owner in (pl_module, trainer.datamodule):
                require_storable({"hyper_parameters": dict(owner.hparams) if owner is not None and owner.hparams else {}})

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """`ckpt_path="last"`: the newest snapshot of the ref; Lightning's own files while there is none."""
        newest = self._resume.point_to_newest()
        if newest is not None:
            return {newest}
        paths: set[str] = super()._find_last_checkpoints(trainer)  # type: ignore[misc]
        return {path for path in paths if read_pointer(path) is None}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See ModelCheckpoint. Raises `ConflictError` if the ref has snapshots of another run, and none was loaded."""
        super().on_train_start(trainer, pl_module)  # type: ignore[misc]
        if trainer.fast_dev_run:
            return
        require_own_ref(self._store, self._ref, 'ckpt_path="last"')
        self._step_seen = trainer.global_step
        state = training_state(trainer, weights_only=self._native.save_weights_only)
        when = Always() if self._when is None else _FilesNamedFirst(self._when, self._asked, lambda: self._name_files(trainer))
        keep = self._policy()
        options: dict[str, Any] = {"keep": keep, "free_dropped": keep is not None, "asynchronous": self._asynchronous}
        self._checkpointer = Checkpointer(self._store, state, ref=self._ref, when=when, group=all_ranks(), **options)
        if self._resume.loaded is not None:
            self._checkpointer.note_resumed(self._resume.loaded)

    def _policy(self) -> Mapping[str, object] | None:
        """The policy of the ref that does what `save_top_k` says."""
        native = self._native
        if self._keep is not None or native.save_top_k == -1 or (native.save_top_k == 0 and not native.save_last):
            return self._keep
        if native.monitor is None or native.save_top_k == 0:
            return {"keep_last": 1}
        return {"keep_last": 1, "keep_best": (native.save_top_k, native.monitor, native.mode)}

    # --- when to save -------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """See ModelCheckpoint. A save waits if it could not be resumed exactly."""
        loop = trainer.fit_loop.epoch_loop
        if loop._should_accumulate():
            return
        is_last = loop.batch_progress.is_last_batch or loop.batch_progress.current.ready >= trainer.num_training_batches
        self._waits = is_last or loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        if self._postponed and not self._waits:  # the evaluation did not come
            self._save_postponed(trainer)
        super().on_train_batch_end(trainer, pl_module=pl_module, outputs=outputs, batch=batch, batch_idx=batch_idx)  # type: ignore[misc]
        if self._when is not None and trainer.global_step != self._step_seen and not trainer.fast_dev_run:
            if self._waits:
                self._postponed = True
            else:
                self._step(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """See ModelCheckpoint."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        is_last = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
        if not trainer.sanity_checking and trainer.state.fn == FITTING:
            self._waits = False
            if self._postponed and not is_last:
                self._save_postponed(trainer)
        super().on_validation_end(trainer, pl_module)  # type: ignore[misc]

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """See ModelCheckpoint."""
        self._waits = False
        super().on_train_epoch_end(trainer, pl_module)  # type: ignore[misc]
        if self._postponed:
            self._save_postponed(trainer)
        trainer.fit_loop._restarting = False  # else Lightning skips schedules that watch a value, in the first epoch after a resume

    def _save_postponed(self, trainer: Any) -> None:
        self._postponed = False
        if self._native._should_skip_saving_checkpoint(trainer):
            return
        if self._when is not None:
            self._step(trainer)
        else:
            candidates = self._native._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    # --- save ---------------------------------------------------------------------------------------------------------

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Tensor]) -> None:
        if self._waits:
            self._postponed = True
        else:
            super()._save_topk_checkpoint(trainer, monitor_candidates)  # type: ignore[misc]

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Tensor]) -> None:
        """Comes last whenever something is saved."""
        if self._waits:
            self._postponed = True
            return
        if self._native.save_last == "link":  # made before the file that it names, and so maybe before its folder
            os.makedirs(self._native.dirpath, exist_ok=True)
        super()._save_last_checkpoint(trainer, monitor_candidates)  # type: ignore[misc]
        if self._asked and not self._is_naming:
            self._step(trainer)

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        self._asked.append(filepath)
        self._native._last_global_step_saved = trainer.global_step
        self._native._last_checkpoint_saved = filepath

    def _name_files(self, trainer: Any) -> None:
        """Lets ModelCheckpoint name the files for a save that the user's trigger causes, and note the best."""
        self._is_naming = True
        candidates = self._native._monitor_candidates(trainer)
        if self._native.monitor is None or self._native.monitor in candidates:
            self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)
        self._native._last_global_step_saved = trainer.global_step
        self._is_naming = False

    def _step(self, trainer: Any, *, last: bool = False) -> None:
        """Saves one snapshot for all files that ModelCheckpoint asked for."""
        self._step_seen = trainer.global_step
        if self._checkpointer is None:
            return
        metrics = trainer.strategy.broadcast(_newest_metrics(trainer))  # values that are not synchronized differ by rank
        saved = self._checkpointer.step(trainer.global_step, metrics, epoch=_epoch_of(trainer), last=last)
        paths = list(self._asked)
        self._asked.clear()
        self._named.finish()
        if self._checkpointer.preempted:
            trainer.should_stop = True
        if saved is None or not paths:
            return  # the Checkpointer warned, and will raise if it goes on
        if trainer.is_global_zero:
            self._named.name(saved, paths, self._store.url, self._ref, run=self._checkpointer.run)
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    # --- end ----------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """See ModelCheckpoint. Raises `StoreError` if the newest save failed."""
        self._waits = False
        if self._postponed:
            self._save_postponed(trainer)
        super().on_train_end(trainer, pl_module)  # type: ignore[misc]
        if self._when is not None and not self._native._should_skip_saving_checkpoint(trainer):
            self._step(trainer, last=True)
        if self._checkpointer is not None:
            self._checkpointer.close(finished=not self._checkpointer.preempted)
            self._named.finish()
        group = all_ranks()
        if group is not None:
            dist.barrier(group)  # all ranks see the pointers

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See ModelCheckpoint."""
        super().teardown(trainer, pl_module, stage)  # type: ignore[misc]
        self._resume.uninstall(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """See ModelCheckpoint. Waits for the saves that have begun."""
        self._waits = False
        super().on_exception(trainer, pl_module, exception)  # type: ignore[misc]
        if self._checkpointer is not None and not isinstance(exception, StoreError):
            try:
                self._checkpointer.wait()
            except StoreError as exc:
                warnings.warn(f"a save failed: {exc}", stacklevel=2)
            self._named.finish()


@short_errors
class SnapshotCheckpoint(SnapshotMixin, ModelCheckpoint):  # type: ignore[misc]
    """ModelCheckpoint of `lightning.pytorch`, which saves into a store: see `SnapshotMixin`."""
