"""`SnapshotCheckpoint`: Lightning's ModelCheckpoint, which saves into a store. `SnapshotMixin` does the same for subclasses.

ModelCheckpoint decides when to save, which checkpoints are the best and how their files are called. Here the files are pointers, and all
that it asks for at one time is one snapshot: `last.ckpt` and the best one name the same.

Lightning cannot continue exactly from a save that comes before an evaluation or the end of an epoch which the same batch causes: it skips
them after a resume. Such saves wait until these have ended. Saves between two batches of one step wait for the step.
"""

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import proxy

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tensorstore_ck.errors import DamageError, InvalidOptionError, NotFoundError, StoreError
from tensorstore_ck.integrations.lightning import logged_values
from tensorstore_ck.integrations.lightning.compatibility import is_sharded, require_supported
from tensorstore_ck.integrations.lightning.lightning_state import OWN, checkpoint_of, restore_sharded, training_state
from tensorstore_ck.integrations.lightning.pointer_files import read_pointer, remove_pointer, write_pointer
from tensorstore_ck.integrations.lightning.strategy_hooks import install
from tensorstore_ck.integrations.lightning.train_loaders import TrainLoaders
from tensorstore_ck.integrations.trainer_pointers import SnapshotPointer
from tensorstore_ck.integrations.trainer_resume import Always, newest_address, require_own_ref
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.store import Store
from tensorstore_ck.store import open as open_store
from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.checkpointing import Checkpointer, Trigger
from tensorstore_ck.training.checkpointing.triggers import DecidedTrigger, TriggerContext
from tensorstore_ck.training.stored_training import StoredTraining, read_training

if TYPE_CHECKING:
    from collections.abc import Iterator

State = dict[str, Any]
FIT: Final = "fit"


class _Resumed(NamedTuple):
    """The snapshot from which this run continues."""

    root: str
    values: State
    """See `TrainerValues`."""
    is_same_size: bool
    """As many ranks saved it."""


class _Noted(Trigger):
    """The user's trigger: Lightning's part is done before the save that it causes."""

    def __init__(self, when: Trigger, before_save: Callable[[], None]) -> None:
        self._when, self._before_save = when, before_save

    def fires(self, moment: TriggerContext) -> bool:
        fires = self._when.fires(moment)
        if fires:
            self._before_save()
        return fires

    def saved(self, moment: TriggerContext) -> None:
        self._when.saved(moment)

    def decided(self) -> "Iterator[DecidedTrigger]":
        return self._when.decided()


class SnapshotMixin:
    """Makes a subclass of ModelCheckpoint save into a store.

    ``class MyCheckpoint(tsck.lightning.SnapshotMixin, lightning.pytorch.callbacks.ModelCheckpoint)``; or that of `pytorch_lightning`.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        ref: str,
        *,
        when: Trigger | None = None,
        keep: Mapping[str, object] | None = None,
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
            InvalidOptionError: `when` is no trigger, or ModelCheckpoint is told when to save as well.
        """
        if when is not None:
            given = [name for name in ("every_n_train_steps", "every_n_epochs", "train_time_interval") if options.get(name) is not None]
            if given or not isinstance(when, Trigger):
                what = f"pass when= or {given[0]}=, not both" if given else f"when must be a trigger, not {when!r}"
                raise InvalidOptionError(what, object_id="when")
            options |= {"every_n_train_steps": 0, "every_n_epochs": 0}
        super().__init__(**options)
        self._given_store, self._ref, self._when, self._keep, self._asynchronous = store, ref, when, keep, asynchronous
        self._opened: Store | None = store if isinstance(store, Store) else None
        self._checkpointer: Checkpointer | None = None
        self._loaded_natively = False
        self._resumed: _Resumed | None = None
        self._hooked: Any = None
        self._asked: list[str] = []
        self._waits = self._postponed = False
        self._step_seen = -1
        self._unfinished: list[tuple[PendingSnapshot, list[str]]] = []
        self._newest_pointers: list[str] = []

    @property
    def _native(self) -> Any:
        """This object, with the private names of ModelCheckpoint."""
        return self

    @property
    def _store(self) -> Store:
        """Opened in the process that trains, which a Strategy may have spawned."""
        if self._opened is None:
            self._opened = open_store(self._given_store, create=True)  # type: ignore[arg-type]
        return self._opened

    @property
    def _group(self) -> "dist.ProcessGroup | None":
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None

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
        others = [each for each in trainer.checkpoint_callbacks if isinstance(each, SnapshotMixin) and each is not self]
        if any((each._store.url, each._ref) == (self._store.url, self._ref) for each in others):
            raise InvalidOptionError(f"two callbacks save to {self._ref!r}: give each a ref of its own", object_id=self._ref)
        if self._hooked is not trainer.strategy:
            self._hooked = trainer.strategy
            install(trainer.strategy, lambda path, native: self._load(trainer, path, native), lambda: self._before_training(trainer))
        if stage == FIT:
            TrainLoaders.of(trainer).begin()
            self._resumed, self._loaded_natively, self._checkpointer = None, False, None
            self._asked, self._waits, self._postponed, self._step_seen = [], False, False, -1
            for each in (pl_module, trainer.datamodule):
                self._store.check({"hyper_parameters": dict(each.hparams) if each is not None and each.hparams else {}})

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """`ckpt_path="last"`: the newest snapshot of the ref; Lightning's own files while there is none."""
        if self._ref not in self._store.branches():
            found: set[str] = super()._find_last_checkpoints(trainer)  # type: ignore[misc]
            return {path for path in found if read_pointer(path) is None}
        newest = self._store.resolve(self._ref)
        path = Path(tempfile.mkdtemp(prefix="tsck-last-")) / f"{self._ref.replace('/', '-')}@{newest.step}.ckpt"
        write_pointer(str(path), SnapshotPointer(self._store.url, newest.root))
        os.utime(path, ns=(newest.time_ns, newest.time_ns))  # Lightning takes the newest of all callbacks
        self._newest_pointers.append(str(path))
        return {str(path)}

    def _load(self, trainer: Any, path: str, load_natively: Callable[[], State]) -> State:
        """The checkpoint that Lightning loads."""
        is_newest = path in self._newest_pointers
        pointer = None if is_newest else read_pointer(path)
        if not is_newest and (pointer is None or pointer.store != self._store.url) and self._has_other(trainer, path, pointer):
            return load_natively()
        if pointer is not None:
            pointer.require_store(self._store.url, path)
        if is_newest:
            stored = self._read_newest(trainer)
        elif pointer is not None:
            stored = self._read(trainer, pointer.address)
        elif os.path.exists(path) or "://" in path:
            self._loaded_natively = True
            return load_natively()
        else:
            stored = self._read(trainer, path)
        fits = trainer.state.fn == "fit"
        size = 1 if self._group is None else self._group.size()
        if fits:
            values: State = stored.rank_values[OWN]
            self._resumed = _Resumed(stored.snapshot.root, values, stored.ranks == size)
            if self._resumed.is_same_size:
                TrainLoaders.of(trainer).resume(values["loaders"])
        if is_sharded(trainer.strategy):
            restore_sharded(trainer, self._store, stored.snapshot.root, self._group, with_optimizers=fits)
            return checkpoint_of(stored, None)
        return checkpoint_of(stored, trainer.lightning_module)

    def _has_other(self, trainer: Any, path: str, pointer: SnapshotPointer | None) -> bool:
        """Whether another callback loads a path."""
        others = [each for each in trainer.checkpoint_callbacks if isinstance(each, SnapshotMixin) and each is not self]
        if pointer is not None:
            return any(pointer.store == each._store.url for each in others)
        return any(path in each._newest_pointers for each in others)

    def _read(self, trainer: Any, address: str) -> StoredTraining:
        sharded = is_sharded(trainer.strategy)
        parts = () if sharded else ("model", "optimizer") if trainer.state.fn == "fit" else ("model",)
        try:
            found = read_training(self._store, address, group=self._group, parts=parts)
        except NotFoundError as exc:
            raise NotFoundError(f"ckpt_path={address!r} is no file, and no snapshot of {self._store.url}: {exc}", object_id=address) from exc
        if OWN not in found.rank_values:
            raise InvalidOptionError(
                f"{address!r} was not saved by tensorstore_ck.lightning: restore it with TrainingState.restore", object_id=address
            )
        return found

    def _read_newest(self, trainer: Any) -> StoredTraining:
        """The newest snapshot that is intact, on all ranks the same."""
        skipped: list[str] = []
        while True:
            address = newest_address(self._store, self._ref, skipped, self._group, "ckpt_path")
            if address is None:
                raise NotFoundError(f"the snapshots of {self._ref!r} were deleted meanwhile", object_id=self._ref)
            try:
                return self._read(trainer, address)
            except DamageError as exc:
                warnings.warn(f"{address} was skipped: {exc}", stacklevel=2)
                skipped.append(address)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See ModelCheckpoint.

        Raises:
            ConflictError: the ref has snapshots of another run, and none was loaded.
        """
        super().on_train_start(trainer, pl_module)  # type: ignore[misc]
        require_own_ref(self._store, self._ref, 'ckpt_path="last"')
        self._step_seen = trainer.global_step
        state = training_state(trainer, weights_only=self._native.save_weights_only)
        when = Always() if self._when is None else _Noted(self._when, lambda: self._note_saves(trainer))
        options: dict[str, Any] = {"keep": self._policy(), "asynchronous": self._asynchronous, "group": self._group}
        self._checkpointer = Checkpointer(self._store, state, ref=self._ref, when=when, **options)

    def _before_training(self, trainer: Any) -> None:
        """Restores what Lightning loses, after the last hook that may draw random numbers or reset values."""
        if self._resumed is None:
            return
        resumed, self._resumed = self._resumed, None
        loop = trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        is_complete = loop.epoch_progress.current.processed >= loop.epoch_progress.current.ready or progress.current.ready == 0
        logged_values.restore(trainer, resumed.values["logged"], batches=0 if is_complete else progress.current.ready)
        if is_complete and progress.current.ready and progress.is_last_batch:
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)  # comes after the save, and Lightning skips it
        if resumed.is_same_size:
            TrainLoaders.of(trainer).set_generators(resumed.values["loader_generators"])
        TrainingState().restore(self._store, resumed.root, group=self._group, parts=("generators",))

    def _policy(self) -> Mapping[str, object] | None:
        """What `save_top_k` means for the ref."""
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
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)  # type: ignore[misc]
        if self._when is not None and trainer.global_step != self._step_seen and not trainer.fast_dev_run:
            if self._waits:
                self._postponed = True
            else:
                self._step(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """See ModelCheckpoint."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        is_last = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
        if not trainer.sanity_checking and trainer.state.fn == "fit":
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
        super()._save_last_checkpoint(trainer, monitor_candidates)  # type: ignore[misc]
        if self._asked and self._when is None:
            self._step(trainer)

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        self._asked.append(filepath)
        self._native._last_global_step_saved = trainer.global_step
        self._native._last_checkpoint_saved = filepath

    def _note_saves(self, trainer: Any) -> None:
        """Lets ModelCheckpoint name the files for a save that the user's trigger causes, and note the best."""
        candidates = self._native._monitor_candidates(trainer)
        if self._native.monitor is None or self._native.monitor in candidates:
            self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)
        self._native._last_global_step_saved = trainer.global_step

    def _step(self, trainer: Any) -> None:
        """Saves one snapshot for all files that ModelCheckpoint asked for."""
        self._step_seen = trainer.global_step
        if self._checkpointer is None:
            return
        saved = self._checkpointer.step(trainer.global_step, _metrics(trainer), epoch=_epoch(trainer))
        paths, self._asked = self._asked, []
        self._finish_pointers(trainer)
        if self._checkpointer.preempted:
            trainer.should_stop = True
        if saved is None or not paths:
            return  # the Checkpointer warned, and will raise if it goes on
        if trainer.is_global_zero:
            address = f"{self._ref}@{trainer.global_step}" if isinstance(saved, PendingSnapshot) else saved.root
            for path in paths:
                write_pointer(path, SnapshotPointer(self._store.url, address))
            if isinstance(saved, PendingSnapshot):
                self._unfinished.append((saved, paths))
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def _finish_pointers(self, trainer: Any) -> None:
        """Writes the root into pointers whose saves have ended; deletes those whose saves failed."""
        left = []
        for pending, paths in self._unfinished:
            if not pending.done():
                left.append((pending, paths))
                continue
            for path in paths:
                found = read_pointer(path)
                if found is None or found.address != f"{self._ref}@{pending.step}":
                    continue  # ModelCheckpoint has removed or replaced it
                try:
                    write_pointer(path, SnapshotPointer(self._store.url, pending.wait().root))
                except StoreError:
                    remove_pointer(path)  # the Checkpointer has warned
        self._unfinished = left

    # --- end ----------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """See ModelCheckpoint.

        Raises:
            StoreError: the newest save failed.
        """
        self._waits = False
        if self._postponed:
            self._save_postponed(trainer)
        super().on_train_end(trainer, pl_module)  # type: ignore[misc]
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._finish_pointers(trainer)
        if self._group is not None:
            dist.barrier(self._group)  # all ranks see the pointers

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """See ModelCheckpoint. Waits for the saves that have begun."""
        self._waits = False
        super().on_exception(trainer, pl_module, exception)  # type: ignore[misc]
        if self._checkpointer is not None and not isinstance(exception, StoreError):
            try:
                self._checkpointer.wait()
            except StoreError as exc:
                warnings.warn(f"a save failed: {exc}", stacklevel=2)
            self._finish_pointers(trainer)


class SnapshotCheckpoint(SnapshotMixin, ModelCheckpoint):  # type: ignore[misc]
    """ModelCheckpoint of `lightning.pytorch`, which saves into a store: see `SnapshotMixin`."""


def _metrics(trainer: Any) -> dict[str, float]:
    """The newest value of each metric that is one number."""
    found = {name: value for name, value in trainer.callback_metrics.items() if isinstance(value, Tensor) and value.numel() == 1}
    return {name: float(value) for name, value in found.items()}


def _epoch(trainer: Any) -> float:
    """The number of epochs that have ended, with the part of the present one."""
    progress, batches = trainer.fit_loop.epoch_progress.current, trainer.num_training_batches
    is_within = progress.ready > progress.processed and batches not in (0, float("inf"))
    share = trainer.fit_loop.epoch_loop.batch_progress.current.ready / batches if is_within else 0.0
    return float(progress.processed) + min(share, 1.0)
