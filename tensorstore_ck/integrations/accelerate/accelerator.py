"""`attach` makes an `accelerate.Accelerator` save into a store: its `save_state` and `load_state` keep their arguments and meaning.

Natively each rank writes its own files, old folders are deleted before the new one is written, and `load_state` takes the newest folder
without a check. Here a save is one snapshot of all ranks, published at once, and `total_limit` is a policy of the ref.
"""

import os
import re
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Final

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.integrations import held_engine
from tensorstore_ck.integrations.accelerate import data_order
from tensorstore_ck.integrations.accelerate.compatibility import require_supported
from tensorstore_ck.integrations.trainer.attach import NativeNames, all_ranks, opened
from tensorstore_ck.integrations.trainer.attach import attach as mix_in
from tensorstore_ck.integrations.trainer.pointers import NamedSaves, read_pointer
from tensorstore_ck.integrations.trainer.saves import new_checkpointer
from tensorstore_ck.integrations.trainer_names import ACCELERATOR_STEP, CUSTOM, LOADERS, SAVE_ITERATION
from tensorstore_ck.log.field_checks import validate_ref_name
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.store import Store
from tensorstore_ck.training import TrainingState, random_generators
from tensorstore_ck.training.checkpointing import Checkpointer
from tensorstore_ck.training.parameter_names import ParameterNames
from tensorstore_ck.training.resume_search import ResumeSearch
from tensorstore_ck.training.stateful_parts import StatefulPart

REFUSED: Final = {DistributedType.MEGATRON_LM: "Megatron-LM", DistributedType.XLA: "XLA"}


@short_errors
class SnapshotMixin(NativeNames):
    """Mixed into the class of an `accelerate.Accelerator`: see `attach`."""

    _store: Store
    _ref: str
    _asynchronous: bool
    _checkpointer: Checkpointer | None
    _saved: list[Any]
    """The objects that the Checkpointer saves."""
    _named: NamedSaves
    _values: dict[str, Any]
    _interrupted: list[Any]
    """Loaders that were restored in the middle of a pass."""

    def _use_store(self, store: Store | str | os.PathLike[str], ref: str, *, asynchronous: bool) -> None:
        native = self._native
        require_supported(native, SnapshotMixin)
        kind = REFUSED.get(native.distributed_type)
        if native.distributed_type == DistributedType.FSDP and not native.is_fsdp2:
            kind = "FSDP version 1 (set fsdp_version: 2)"
        if kind is not None:
            raise InvalidOptionError(f"the states of {kind} cannot be saved by tsck.accelerate", object_id="accelerator")
        validate_ref_name(ref)
        self._store = opened(store)
        self._ref, self._asynchronous, self._checkpointer = ref, asynchronous, None
        self._named = NamedSaves()
        self._saved, self._values, self._interrupted = [], {}, []
        for loader in native._dataloaders:
            data_order.note_order(loader)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled copy is accelerate's own: no two processes save for one."""
        state = {name: value for name, value in vars(self).items() if name not in SnapshotMixin.__annotations__}
        return object.__new__, (type(self).__bases__[1],), state

    @property
    def _group(self) -> "dist.ProcessGroup | None":
        """None: one process. A single rank of DeepSpeed is a group, since its parameters are partitioned."""
        return all_ranks(also_one=self._is_deepspeed)

    @property
    def _is_deepspeed(self) -> bool:
        return bool(self._native.distributed_type == DistributedType.DEEPSPEED)

    @property
    def _engine(self) -> Any:
        """DeepSpeed's; None: there is none."""
        engines = self._native._models if self._is_deepspeed else []
        if len(engines) > 1:
            raise InvalidOptionError(
                f"this Accelerator has prepared {len(engines)} models for DeepSpeed, and one can be saved: prepare each with an "
                "Accelerator of its own, and attach these to refs of their own",
                object_id="accelerator",
            )
        return engines[0] if engines else None

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """See accelerate.

        Raises:
            InvalidOptionError: an engine of DeepSpeed has something that cannot be saved, such as tensor parallelism.
        """
        prepared = super().prepare(*args, device_placement=device_placement)  # type: ignore[misc]
        held_engine.require_supported(self._engine)
        return prepared

    def prepare_data_loader(self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None) -> Any:
        """See accelerate."""
        if not self._native.use_seedable_sampler:
            data_order.note_order(data_loader)
        prepared = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)  # type: ignore[misc]
        data_order.note_order(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """See accelerate. It takes over the pass that was restored, so the loader's next pass has the next number."""
        skipped = super().skip_first_batches(dataloader, num_batches)  # type: ignore[misc]
        if any(dataloader is loader for loader in self._interrupted):
            self._interrupted = [loader for loader in self._interrupted if loader is not dataloader]
            skipped.iteration = dataloader.iteration  # accelerate below 1.15 begins at 0
            dataloader.iteration += 1
        return skipped

    # --- save ---------------------------------------------------------------------------------------------------------

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path | None:
        """Saves models, optimizers, schedules, scaler, generators, registered objects and the order of data loaders; on all processes.

        Args:
            output_dir: A folder that will name the snapshot, for `load_state`; None: with automatic checkpoint naming accelerate's, else
                no folder.
            safe_serialization: Ignored: there is no other kind.
            save_model_func_kwargs: Ignored: they are for DeepSpeed.

        Returns:
            The folder; None if there is none, or if the save failed with a warning.

        Raises:
            ConflictError: the ref has snapshots of another run, and this one began without `load_state`.
            InvalidOptionError: hooks or automatic naming lack a folder, or accelerate wrote it.
            StoreError: the save failed permanently; see `Checkpointer`.
        """
        native, config = self._native, self._native.project_configuration
        if config.automatic_checkpoint_naming:
            output_dir = self._automatic_folders() / f"checkpoint_{config.iteration}"
        folder = None if output_dir is None else Path(output_dir)
        if folder is not None and is_native(folder):
            raise InvalidOptionError(f"{folder} is a checkpoint that accelerate wrote: save to another folder", object_id=str(folder))
        self._call_save_hooks(folder)
        if not native.sync_gradients:
            warnings.warn("saved between the micro-batches of a step, whose gradients so far are not saved", stacklevel=2)
        checkpointer = self._checkpointer_of_now()
        self._note_values()
        with held_engine.partitioned(self._engine):
            saved = checkpointer.step(config.iteration)
        config.iteration += 1
        self._named.finish()
        if saved is None or folder is None:
            return None
        if native.is_main_process or (config.save_on_each_node and native.is_local_main_process):
            self._named.name(saved, [folder], self._store.url, self._ref, run=checkpointer.run)
            if config.automatic_checkpoint_naming and config.total_limit is not None:
                light = [path for _, path in numbered(folder.parent) if read_pointer(path) is not None]  # else accelerate wrote it
                for path in light[: max(0, len(light) - config.total_limit)]:
                    shutil.rmtree(path, ignore_errors=True)
        return folder

    def _automatic_folders(self) -> Path:
        if self._native.project_dir is None:
            raise InvalidOptionError("automatic_checkpoint_naming needs project_dir= of the Accelerator", object_id="project_dir")
        return Path(self._native.project_dir) / "checkpoints"

    def _call_save_hooks(self, folder: Path | None) -> None:
        hooks = self._native._save_model_state_pre_hook
        if not hooks:
            return
        if folder is None:
            raise InvalidOptionError("the hooks of save_state write files: pass output_dir=", object_id="output_dir")
        folder.mkdir(parents=True, exist_ok=True)
        native = self._native
        is_sharded = native.distributed_type in {DistributedType.FSDP, DistributedType.DEEPSPEED}  # accelerate gives no weights then
        weights = [] if is_sharded else [native.get_state_dict(model, unwrap=False) for model in native._models]
        for hook in hooks.values():
            hook(native._models, weights, str(folder))

    def _checkpointer_of_now(self) -> Checkpointer:
        """A script may prepare or register objects between two saves: what exists now is saved."""
        native = self._native
        objects = [*native._models, *native._optimizers, *native._schedulers, *native._custom_objects, native.scaler]
        if self._checkpointer is None or [*map(id, objects)] != [*map(id, self._saved)]:
            self._finish_saves()
            limit = native.project_configuration.total_limit
            keep = None if limit is None else {"keep_last": limit}
            options: dict[str, Any] = {"group": self._group, "keep": keep, "asynchronous": self._asynchronous}
            self._checkpointer = new_checkpointer(self._store, self._training(), self._ref, argument="load_state()", **options)
            self._saved = objects
        return self._checkpointer

    def _training(self) -> TrainingState:
        native, engine = self._native, self._engine
        models = _one_or_all(native._models) if engine is None else None
        names = ParameterNames(StatefulPart.of("model", models).objects)
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in native._optimizers] if engine is None else []
        custom = {f"{CUSTOM}{number}": held for number, held in enumerate(native._custom_objects)}
        modules = {name: held for name, held in custom.items() if isinstance(held, nn.Module)}
        # accelerate also saves optimizers of models that were not prepared: their gradients may differ between processes
        alone = {f"optimizer_{number}": optimizer for number, optimizer in enumerate(optimizers) if _trains_none_of(names, optimizer)}
        # other objects are each process's own as well: nothing says that their values are equal, or become tensors later
        own = {name: held for name, held in custom.items() if name not in modules}
        self._values = {ACCELERATOR_STEP: 0, SAVE_ITERATION: 0, LOADERS: [], **alone, **own}
        schedulers = _one_or_all(native._schedulers)
        if engine is not None:
            return held_engine.training_of(engine, self._values, schedulers=schedulers, extra=modules)
        return TrainingState(
            model=models,
            optimizer=_one_or_all([optimizer for optimizer in optimizers if not _trains_none_of(names, optimizer)]),
            scheduler=schedulers,
            scaler=native.scaler,
            extra=modules,
            rank_values=self._values,
        )

    def _note_values(self) -> None:
        native = self._native
        active = [loader for loader in native.gradient_state.dataloader_references if loader is not None]
        loaders = []
        for loader in native._dataloaders:
            sampler = data_order.sampler_of(loader)
            same = (
                running for running in active if running is loader or (sampler is not None and data_order.sampler_of(running) is sampler)
            )
            loaders.append(data_order.capture(loader, next(same, None)))
        self._values.update({ACCELERATOR_STEP: native.step, SAVE_ITERATION: native.project_configuration.iteration, LOADERS: loaders})

    def end_training(self) -> None:
        """Waits for the saves, then see accelerate. Raises `StoreError` if the newest save failed."""
        try:
            self._finish_saves(finished=True)
        finally:
            super().end_training()  # type: ignore[misc]

    def free_memory(self, *objects: Any) -> list[Any]:
        """Waits for the saves, then see accelerate."""
        self._finish_saves()
        self._interrupted = []
        released: list[Any] = super().free_memory(*objects)  # type: ignore[misc]
        return released

    def _finish_saves(self, *, finished: bool = False) -> None:
        """Waits, and keeps no reference to what was saved. `finished`: see `Checkpointer.close`."""
        checkpointer, self._checkpointer = self._checkpointer, None
        self._saved, self._values = [], {}
        try:
            if checkpointer is not None:
                checkpointer.close(finished=finished)
        finally:
            self._named.finish()

    # --- load ---------------------------------------------------------------------------------------------------------

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Restores what `save_state` saved, on any number of processes.

        Args:
            input_dir: A folder of `save_state`; or an address in the store, such as ``runs/x@10``. A branch means its newest intact
                snapshot. None: that of the ref; if it has none, what accelerate's Accelerator loads. accelerate itself loads a folder
                that it wrote.
            load_kwargs: For a folder that accelerate wrote.
            load_model_func_kwargs: For a folder that accelerate wrote.

        Raises:
            NotFoundError: there is no such snapshot.
            MismatchError: it does not fit models, optimizers or registered objects.
            DamageError: it is damaged; of a branch: all are.
        """
        self._finish_saves()
        input_dir = None if input_dir is None else os.path.expanduser(input_dir)
        address = self._ref if input_dir is None else self._address_of(input_dir)
        if address is not None:
            missing = "" if input_dir is None else f"{address!r} is neither a folder nor a snapshot in {self._store.url}"
            advice = "pass an earlier step, or load_state({}) to accept it"
            search = ResumeSearch(self._store, address, self._group, advice=advice, missing=missing)
            if search.restore(lambda named: self._restore(named, input_dir)) is not None:
                return
        folder = self._newest_native_folder() if input_dir is None else Path(input_dir)
        super().load_state(os.fspath(folder), load_kwargs, **load_model_func_kwargs)  # type: ignore[misc]
        if match := AUTOMATIC.fullmatch(folder.name):  # accelerate forgets it, and the next save would get the name of an old one
            self._native.project_configuration.iteration = int(match[1]) + 1

    def _newest_native_folder(self) -> Path:
        """The newest that accelerate wrote; itself it would take one that names a snapshot, or that a kill left empty."""
        if self._native.project_configuration.automatic_checkpoint_naming:
            native = [folder for _, folder in numbered(self._automatic_folders()) if is_native(folder)]
            if native:
                return native[-1]
        raise NotFoundError(f"{self._ref!r} has no snapshot yet, so there is nothing to load", object_id=self._ref)

    def _address_of(self, given: str) -> str | None:
        """The snapshot to load; None: accelerate loads a folder of its own."""
        if not os.path.isdir(given):
            return given
        pointer = read_pointer(given)
        return None if pointer is None else pointer.address_in(self._store, given)

    def _call_load_hooks(self, given: str | None) -> None:
        """With the folder that the hooks of the save wrote to, if it is there."""
        hooks = self._native._load_model_state_pre_hook
        if hooks and given is None and self._native.project_configuration.automatic_checkpoint_naming:
            given = str(self._automatic_folders() / f"checkpoint_{self._values[SAVE_ITERATION]}")
        if given is not None and os.path.isdir(given):
            for hook in hooks.values():
                hook([] if self._is_deepspeed else [*self._native._models], given)  # as accelerate

    def _restore(self, address: str, given: str | None) -> Snapshot | None:
        native = self._native
        with held_engine.partitioned(self._engine):
            snapshot = self._training().restore(self._store, address, group=self._group)
        with random_generators.preserved():  # the hooks may draw from the generators
            self._call_load_hooks(given)
        native.step = self._values[ACCELERATOR_STEP]
        native.project_configuration.iteration = self._values[SAVE_ITERATION] + 1
        found_loaders = [*zip(native._dataloaders, self._values[LOADERS], strict=False)]
        self._interrupted = [loader for loader, state in found_loaders if data_order.restore(loader, state)]
        return snapshot


@short_errors
def attach(accelerator: accelerate.Accelerator, *, store: Store | str | os.PathLike[str], ref: str, asynchronous: bool = True) -> None:
    """Makes `save_state` and `load_state` of an Accelerator use a store. Call it before `prepare`, on all processes.

    `total_limit` of its `ProjectConfiguration` becomes a policy of the ref: that many of the newest snapshots, at least two. What it drops
    is freed while the run goes on.

    Args:
        accelerator: The Accelerator.
        store: The store; or its URL or path, where it is created if there is none.
        ref: The branch.
        asynchronous: Save in the background; `end_training`, and the end of the process, wait for it.

    Raises:
        InvalidOptionError: it saves into a store already; or FSDP version 1, Megatron-LM or XLA is on.
        InvalidNameError: `ref` is no valid name.
        MissingExtraError: accelerate has another version than those that are supported.
    """
    begin = partial(SnapshotMixin._use_store, accelerator, store, ref, asynchronous=asynchronous)
    mix_in(accelerator, SnapshotMixin, accelerate.Accelerator, begin, title="Accelerator", expected="an accelerate.Accelerator")


def _one_or_all(objects: list[Any]) -> Any:
    return None if not objects else objects[0] if len(objects) == 1 else list(objects)


def _trains_none_of(names: ParameterNames, optimizer: torch.optim.Optimizer) -> bool:
    return all(names.of(parameter) is None for group in optimizer.param_groups for parameter in group["params"])


AUTOMATIC: Final = re.compile(r"checkpoint_(\d+)")


def is_native(folder: Path) -> bool:
    """Whether accelerate wrote it: generators are among the last of its files."""
    return any(folder.glob("random_states_*.pkl"))


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Folders of automatic naming, in their order; none if `folder` does not exist."""
    return sorted((int(match[1]), path) for path in folder.glob("checkpoint_*") if (match := AUTOMATIC.fullmatch(path.name)))
