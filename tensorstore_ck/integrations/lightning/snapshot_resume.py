"""Loads snapshots where Lightning loads checkpoints, and restores what Lightning loses before its loop goes on."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.integrations.lightning import logged_values
from tensorstore_ck.integrations.lightning.compatibility import is_sharded
from tensorstore_ck.integrations.lightning.lightning_state import OWN, checkpoint_of, restore_sharded
from tensorstore_ck.integrations.lightning.pointer_files import read_pointer, write_pointer
from tensorstore_ck.integrations.lightning.train_loaders import TrainLoaders, has_ended, require_replays
from tensorstore_ck.integrations.trainer.attach import all_ranks, opened
from tensorstore_ck.integrations.trainer.pointers import SnapshotPointer
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.store import Store
from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.resume_search import ResumeSearch
from tensorstore_ck.training.state_sides import StoredTraining, read_training

State = dict[str, Any]
FITTING: Final = "fit"
RESUMES: Final = "_tsck_resumes"
"""Attribute of a Strategy."""


class _Loaded(NamedTuple):
    """The snapshot from which this run continues."""

    snapshot: Snapshot
    values: State
    """See `TrainerValues`."""
    is_same_size: bool
    """As many ranks saved it."""


class OpenedStore:
    """A store; one that was given by its path is opened when it is first used: in the process that trains, which a Strategy may start."""

    def __init__(self, given: Store | str | os.PathLike[str]) -> None:
        self._given = given
        self._store: Store | None = None

    def __getstate__(self) -> State:
        return {"_given": self._given, "_store": None}

    def get(self) -> Store:
        """The open store."""
        if self._store is None:
            self._store = opened(self._given)
        return self._store


class SnapshotResume:
    """The resume of one callback, from its store and ref."""

    def __init__(self, store: "OpenedStore", ref: str) -> None:
        self._opened, self._ref = store, ref
        self._loaded: _Loaded | None = None
        self._newest_pointers: set[str] = set()

    @property
    def _store(self) -> Store:
        return self._opened.get()

    def install(self, trainer: Any) -> None:
        """Takes part in what this Trainer's Strategy loads. Replaces methods of the object, not of its class."""
        strategy = trainer.strategy
        installed: list[SnapshotResume] = getattr(strategy, RESUMES, [])
        if any(resume is self for resume in installed):
            return
        load_natively, start = strategy.load_checkpoint, strategy.on_train_start

        def load_checkpoint(checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> State:
            return self._load(trainer, str(checkpoint_path), lambda: load_natively(checkpoint_path, weights_only=weights_only))

        def on_train_start() -> None:
            start()
            self._before_training(trainer)

        strategy.load_checkpoint, strategy.on_train_start = load_checkpoint, on_train_start
        setattr(strategy, RESUMES, [*installed, self])

    def uninstall(self, trainer: Any) -> None:
        """Leaves the Strategy as it was, for all callbacks: they are at their end together."""
        if vars(trainer.strategy).pop(RESUMES, None) is not None:
            for name in ("load_checkpoint", "on_train_start"):
                vars(trainer.strategy).pop(name, None)
        TrainLoaders.of(trainer).end()

    def begin(self, trainer: Any) -> None:
        """A run begins, and nothing is loaded yet."""
        TrainLoaders.of(trainer).resume([])
        self._loaded = None

    @property
    def loaded(self) -> Snapshot | None:
        """The snapshot from which this run continues, until its first step."""
        return None if self._loaded is None else self._loaded.snapshot

    def point_to_newest(self) -> str | None:
        """A new pointer that stands for the newest intact snapshot; None if the ref has none."""
        if self._ref not in self._store.branches():
            return None
        newest = self._store.resolve(self._ref)
        path = Path(tempfile.mkdtemp(prefix="tsck-last-")) / f"{self._ref.replace('/', '-')}@{newest.step}.ckpt"
        write_pointer(str(path), SnapshotPointer(self._store.url, newest.root))
        os.utime(path, ns=(newest.time_ns, newest.time_ns))  # Lightning takes the newest of all callbacks
        self._newest_pointers.add(str(path))
        return str(path)

    # --- loads --------------------------------------------------------------------------------------------------------

    def _load(self, trainer: Any, path: str, load_natively: Callable[[], State]) -> State:
        """The checkpoint that Lightning loads from a path or an address."""
        others: list[SnapshotResume] = [resume for resume in getattr(trainer.strategy, RESUMES) if resume is not self]
        if any(path in other._newest_pointers for other in others):
            return load_natively()
        is_newest = path in self._newest_pointers
        pointer = None if is_newest else read_pointer(path)
        if pointer is not None and pointer.store != self._store.url and any(pointer.store == other._store.url for other in others):
            return load_natively()
        if is_newest:
            loaded = self._load_from(trainer, self._ref)
            self._newest_pointers.discard(path)
            shutil.rmtree(Path(path).parent, ignore_errors=True)
            return loaded
        if pointer is not None:
            return self._load_from(trainer, pointer.address_in(self._store, path))
        if os.path.exists(path) or "://" in path:
            return load_natively()
        try:
            return self._load_from(trainer, path)
        except NotFoundError:
            if any(other._store.url != self._store.url for other in others):
                return load_natively()  # the next callback's store may have it
            raise

    def _load_from(self, trainer: Any, address: str) -> State:
        """The state at an address. A branch means its newest intact snapshot, the same on all ranks."""
        missing = f"ckpt_path={address!r} is no file, and no snapshot of {self._store.url}"
        advice = "pass an earlier step, or ckpt_path={} to accept it"
        search = ResumeSearch(self._store, address, all_ranks(), advice=advice, missing=missing)
        return search.restore(lambda named: self._checkpoint(trainer, self._read(trainer, named))) or {}

    def _checkpoint(self, trainer: Any, stored: StoredTraining) -> State:
        fits = trainer.state.fn == FITTING
        group = all_ranks()
        if fits:
            values: State = stored.rank_values[OWN]
            self._loaded = _Loaded(stored.snapshot, values, stored.ranks == (1 if group is None else group.size()))
            if self._loaded.is_same_size:
                require_replays(values["loaders"], values["checkpoint"]["loops"]["fit_loop"])
                TrainLoaders.of(trainer).resume(values["loaders"])
        if not is_sharded(trainer.strategy):
            return checkpoint_of(stored, trainer.lightning_module)
        restore_sharded(trainer, self._store, stored.snapshot.root, group, with_optimizers=fits)
        return checkpoint_of(stored, None)

    def _read(self, trainer: Any, address: str) -> StoredTraining:
        parts: tuple[str, ...] = ("model", "optimizer") if trainer.state.fn == FITTING else ("model",)
        stored = read_training(self._store, address, group=all_ranks(), parts=() if is_sharded(trainer.strategy) else parts)
        if OWN not in stored.rank_values:
            raise InvalidOptionError(
                f"{address!r} was not saved by tensorstore_ck.lightning: restore it with TrainingState.restore", object_id=address
            )
        return stored

    # --- the loop goes on ---------------------------------------------------------------------------------------------

    def _before_training(self, trainer: Any) -> None:
        """After the last hook that may draw random numbers or reset values."""
        if self._loaded is None:
            return
        loaded, self._loaded = self._loaded, None
        loop = trainer.fit_loop
        is_ended = has_ended(loop)
        within_epoch = not is_ended and loop.epoch_loop.batch_progress.current.ready > 0
        logged_values.restore(trainer, loaded.values["logged"], within_epoch=within_epoch)
        if is_ended:
            _end_epoch(loop)
        else:  # go on within the epoch, which a former `max_steps` may have ended
            for epochs in (loop.epoch_progress.current, loop.epoch_progress.total):
                epochs.processed = min(epochs.processed, max(0, epochs.ready - 1))
        if loaded.is_same_size:
            TrainLoaders.of(trainer).set_generators(loaded.values["loader_generators"])
        TrainingState().restore(self._store, loaded.snapshot.root, group=all_ranks(), parts=("generators",))


def _end_epoch(loop: Any) -> None:
    """Does what comes after the save at the end of an epoch. Lightning skips it; or, with `max_steps`, ends the epoch once more."""
    epochs = loop.epoch_progress
    if loop.epoch_loop._num_ready_batches_reached():
        epochs.current.completed = epochs.current.processed - 1
        loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    epochs.current.completed, epochs.total.completed = epochs.current.processed, epochs.total.processed
    loop._restarting = loop.epoch_loop.restarting = False
    loop._resuming_from_checkpoint = False  # so that it begins the data of the next epoch
    loop.reset_restart_stage()
