"""`Trainer`: transformers' own, which saves into a store. `SnapshotMixin` does the same for subclasses, `attach` for an existing object.

transformers restores in several places of its loop. Here it restores in three: the counters before the loop (they go through the light
folder, which transformers reads), weights and optimizer after both exist, and the generators after the first batches were skipped.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
import transformers
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, TrainOutput, rotate_checkpoints

from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.replace_file import replace_file
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, NotFoundError, StoreError
from tensorstore_ck.integrations import held_engine
from tensorstore_ck.integrations.hf import small_files, trainer_values, weights
from tensorstore_ck.integrations.hf.compatibility import require_supported
from tensorstore_ck.integrations.hf.exception_save import ExceptionSaveMixin
from tensorstore_ck.integrations.hf.resume_source import ARGUMENT, begin_search, native_folder, remove_imported, write_imported
from tensorstore_ck.integrations.hf.weights import AdapterBase
from tensorstore_ck.integrations.model_file_names import MODEL_FILES
from tensorstore_ck.integrations.trainer import persistent_workers
from tensorstore_ck.integrations.trainer.attach import attach as mix_in
from tensorstore_ck.integrations.trainer.attach import opened
from tensorstore_ck.integrations.trainer.pointers import NamedSaves, SnapshotPointer, is_there, read_pointer, write_pointer
from tensorstore_ck.integrations.trainer.saves import new_checkpointer, published_or_newest
from tensorstore_ck.integrations.trainer_names import TRAINER_STATE
from tensorstore_ck.log.field_checks import validate_ref_name
from tensorstore_ck.store import Store
from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.checkpointing import Checkpointer
from tensorstore_ck.training.per_rank_state import VALUES

NOT_WEIGHTS: Final = ("optimizer", "scheduler", "scaler", "rank_values")
"""Restored together with the weights; the generators come last."""


@short_errors
class SnapshotMixin(ExceptionSaveMixin):
    """Makes a subclass of transformers' Trainer save into a store: ``class MyTrainer(SnapshotMixin, transformers.Trainer)``."""

    def __init__(
        self,
        *args: Any,
        store: Store | str | os.PathLike[str],
        ref: str,
        asynchronous: bool = True,
        save_base: bool = False,
        frozen_base: bool = False,
        on_exception: bool = True,
        **options: Any,
    ) -> None:
        """All arguments but these go to the Trainer, and keep their meaning.

        `save_total_limit` becomes a policy of the ref: the newest snapshots, and the best one if there is a metric for it. What it drops
        is freed while the run goes on.

        Args:
            args: For the Trainer.
            store: The store; or its URL or path, where it is created if there is none.
            ref: The branch; each trial of a hyperparameter search has one below it.
            asynchronous: Save in the background.
            save_base: Store the base below adapters of peft in each snapshot. By default a snapshot holds what peft saves, the adapter, and
                refers to the base by name and hash: a resume with another base is a MismatchError, and so is a resume without peft.
                With DeepSpeed, FSDP or quantized weights the base is stored.
            frozen_base: Store the base, too; parameters that do not require gradients do not change: they are read at the first save and at
                each tenth, and not copied. A change is an error: at the next save or, if torch does not note it (`merge_adapter`, a model
                that averages weights), at the tenth.
            on_exception: In one process, save if an exception comes between two steps, such as in an evaluation, and `save_strategy` is on.
            options: For the Trainer.

        Raises:
            MissingExtraError: transformers has another version than those that are supported.
            InvalidOptionError: FSDP1 is on, or DeepSpeed and `frozen_base`.
            InvalidNameError: `ref` is no valid name.
        """
        super().__init__(*args, **options)
        self._use_store(store, ref, asynchronous=asynchronous, save_base=save_base, frozen_base=frozen_base, on_exception=on_exception)

    def _use_store(
        self, store: Store | str | os.PathLike[str], ref: str, *, asynchronous: bool, save_base: bool, frozen_base: bool, on_exception: bool
    ) -> None:
        require_supported(SnapshotMixin)
        self._saves_on_exception = on_exception and self._native.args.save_strategy != SaveStrategy.NO
        if self._native.is_deepspeed_enabled and frozen_base:
            raise InvalidOptionError(
                "frozen_base= cannot be used with DeepSpeed, which keeps parameters in another way", object_id="frozen_base"
            )
        if getattr(getattr(self._native.accelerator.state, "fsdp_plugin", None), "fsdp_version", 2) != 2:
            raise InvalidOptionError("FSDP version 1 is on, which cannot be saved: set fsdp_config={'version': 2}", object_id="fsdp")
        validate_ref_name(ref)
        self._store = opened(store)
        self._ref, self._asynchronous = ref, asynchronous
        self._checkpointer: Checkpointer | None = None
        self._values: dict[str, Any] = {}
        self._frozen_base = weights.FrozenBase() if frozen_base else None
        self._frozen: list[str] = []
        self._saves_base = save_base or frozen_base
        self._known_base: AdapterBase | None = None
        self._reference: AdapterBase | None = None
        self._is_resuming = False
        self._named = NamedSaves()

    @property
    def _engine(self) -> Any:
        """DeepSpeed's, once it is prepared; None: there is none."""
        return self._native.deepspeed if self._native.is_deepspeed_enabled else None

    @property
    def _base(self) -> AdapterBase:
        """The base of the present model, which transformers may make itself."""
        if self._known_base is None or self._known_base.model is not self._native.model:
            self._known_base = AdapterBase(self._native.model)
        return self._known_base

    # --- resume -------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> TrainOutput:
        """As transformers' Trainer, but for `resume_from_checkpoint`.

        ``"auto"`` is the newest intact snapshot of the ref, or the beginning if there is none, so that the first start and each later one
        are the same call. True is the same, and it must be there. An address in the store, such as ``runs/x@10``, is that snapshot, and a
        branch its newest intact one. A folder may be of this Trainer or of transformers; if its save was never published, the newest
        snapshot is taken, with a warning.

        Raises:
            ConflictError: the ref has snapshots of another run, and `resume_from_checkpoint` is not given.
            StoreError: a save failed permanently; see `Checkpointer`.
        """
        self._checkpointer = self._known_base = self._reference = None
        self._frozen_base = None if self._frozen_base is None else weights.FrozenBase()
        given = published_or_newest(self._store, resume_from_checkpoint, self._ref_of(trial), self._group)
        search = begin_search(self._store, given, self._ref_of(trial), self._group)
        output: TrainOutput | None = None
        while output is None:
            address = None if search is None else search.next_address()
            self._is_resuming = address is not None
            try:
                folder = (
                    native_folder(given, self._native.args.output_dir, self._ref) if address is None else self._light_folder(address, given)
                )
                output = super().train(folder, trial, ignore_keys_for_eval)  # type: ignore[misc]
            except StoreError as exc:
                if search is None or not self._is_resuming:
                    raise
                search.note_failure(exc)
        state = self._native.state
        self._finish_saves(finished=state.global_step >= state.max_steps)
        remove_imported(self._native.args.output_dir)
        return output

    def _light_folder(self, address: str, given: str | bool | None) -> str:
        """The light folder from which transformers resumes: the given one, or one that is written now; or an imported snapshot's."""
        args = self._native.args
        values = trainer_values.target()
        imported = write_imported(self._store, address, args.output_dir, self._group, writes=args.local_process_index == 0)
        if imported is not None:
            self._is_resuming = False
            return str(imported)
        snapshot = TrainingState(rank_values=values).restore(self._store, address, group=self._group, parts=(VALUES,))
        if snapshot is None:
            raise NotFoundError(f"{address} was deleted meanwhile", object_id=address)
        is_given = isinstance(given, str) and os.path.isdir(given)
        folder = Path(str(given)) if is_given else self._folder(snapshot.step)
        if args.local_process_index == 0 and not (is_given and (folder / TRAINER_STATE_NAME).exists()):
            write_pointer(folder, SnapshotPointer(self._store.url, snapshot.root))
            replace_file(folder / TRAINER_STATE_NAME, values[TRAINER_STATE].encode())
        if args.local_process_index == 0:
            self._name_best(parse_json(values[TRAINER_STATE]).get("best_global_step"), snapshot.ref)
        if self._group is not None:
            dist.barrier(self._group)
        return str(folder)

    def _name_best(self, step: int | None, ref: str) -> None:
        """Names the best snapshot so far where this host lacks its folder."""
        if step is not None and not self._folder(step).exists() and is_there(self._store, f"{ref}@{step}"):
            write_pointer(self._folder(step), SnapshotPointer(self._store.url, self._store.resolve(f"{ref}@{step}").root))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if read_pointer(resume_from_checkpoint) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or read_pointer(checkpoint) is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """With DeepSpeed transformers would load a checkpoint of DeepSpeed in the middle of this."""
        has_pointer = resume_from_checkpoint is not None and read_pointer(resume_from_checkpoint) is not None
        is_light = self._native.is_deepspeed_enabled and has_pointer
        natively = None if is_light else resume_from_checkpoint
        prepared = super()._prepare_for_training(max_steps, train_dataloader, natively)  # type: ignore[misc]
        held_engine.require_supported(self._engine)
        if is_light:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        pointer = None if checkpoint is None else read_pointer(checkpoint)
        if pointer is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self._values = trainer_values.target()
        parts = NOT_WEIGHTS if self._engine is None else ("model", "extra", *NOT_WEIGHTS)
        with held_engine.partitioned(self._engine):
            self._training(self._values).restore(self._store, pointer.address, group=self._group, parts=parts)
        if self._engine is None:
            self._load_weights(pointer.address)
        self._note_best_folder()
        self._is_resuming = False

    def _load_weights(self, address: str) -> None:
        if self._engine is None:
            weights.restore(self._native, self._store, address, self._group, base=self._base)
            return
        with held_engine.partitioned(self._engine):
            self._training({}).restore(self._store, address, group=self._group, parts=("model",))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        pointer = None if checkpoint is None else read_pointer(checkpoint)
        if pointer is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
            return
        persistent_workers.begin(self._native.callback_handler.train_dataloader)
        TrainingState().restore(self._store, pointer.address, group=self._group, parts=("generators",))
        trainer_values.restore(self._native, self._values)

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """A finished run is not continued: transformers would train one more step, if it has ended within an epoch."""
        state = self._native.state
        if state.global_step < state.max_steps:
            super()._run_epoch(*args, **options)

    def _load_best_model(self) -> None:
        pointer, self._is_between_steps = read_pointer(self._native.state.best_model_checkpoint), False
        if pointer is None:
            super()._load_best_model()  # type: ignore[misc]
            return
        if self._checkpointer is not None:  # else this run has saved nothing
            self._checkpointer.wait()
        self._load_weights(pointer.address)

    # --- save ---------------------------------------------------------------------------------------------------------

    def _note_best_folder(self, trial: Any = None) -> None:
        native, state = self._native, self._native.state
        if native.args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST) and state.best_global_step:
            best = self._folder(state.best_global_step, trial)
            if state.best_global_step == state.global_step or best.exists():
                state.best_model_checkpoint = str(best)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        native, state = self._native, self._native.state
        if native.hp_search_backend is None and trial is None:
            native.store_flos()
        folder = self._folder(state.global_step, trial)
        self._note_best_folder(trial)
        if native.args.should_save:
            trainer_values.note_callbacks(native)
        self._values.update(trainer_values.capture(native))
        if self._checkpointer is None:
            self._checkpointer = self._new_checkpointer(self._ref_of(trial))
        if self._frozen_base is not None:
            self._frozen[:] = self._frozen_base.names(native.model)
        metrics = trainer_values.step_metrics(state, self._store, self._group)
        metadata: dict[str, object] = {} if self._reference is None else {**self._reference.metadata()}
        if state.num_input_tokens_seen:
            metadata["tokens_seen"] = state.num_input_tokens_seen
        with held_engine.partitioned(self._engine):
            saved = self._checkpointer.step(state.global_step, metrics, epoch=state.epoch, metadata=metadata)
        self._named.finish()
        self._saved_step = state.global_step if saved is not None else self._saved_step
        if saved is None:
            return  # the Checkpointer warned, and will raise if it goes on
        if native.args.should_save:
            # The pointer first: a kill before the second file must not leave what looks like a folder of transformers
            self._named.name(saved, [folder], self._store.url, self._ref_of(trial), run=self._checkpointer.run)
            replace_file(folder / TRAINER_STATE_NAME, self._values[TRAINER_STATE].encode())
        if native.args.push_to_hub:
            native.save_model(str(folder), _internal_call=True)
            native._push_from_checkpoint(str(folder))
        if native.args.should_save:
            rotate_checkpoints(
                output_dir=str(folder.parent),
                save_total_limit=native.args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=True,
            )

    def _new_checkpointer(self, ref: str) -> Checkpointer:
        args = self._native.args
        keep: dict[str, object] | None = None
        if args.save_total_limit is not None and args.save_total_limit > 0:
            keep = {"keep_last": args.save_total_limit}
            if args.metric_for_best_model is not None:
                metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
                keep["keep_best"] = (1, metric, "max" if args.greater_is_better else "min")
        files = small_files.capture(self._native, self._group)
        training = self._training(self._values, files)
        refers = not self._saves_base and self._engine is None and weights.takes_by_name(self._native)
        left_out = self._base.choose(files.get(MODEL_FILES, {})) if refers else ()
        if left_out:
            self._reference, training = self._base, training.leaving_out(left_out)
            if args.process_index == 0:
                self._base.announce()
        options: dict[str, Any] = {"group": self._group, "keep": keep, "asynchronous": self._asynchronous}
        return new_checkpointer(self._store, training, ref, argument=ARGUMENT, **options)

    def _training(self, values: dict[str, Any], extra: dict[str, Any] | None = None) -> TrainingState:
        native = self._native
        optimizer, scaler = native.optimizer, getattr(native.accelerator, "scaler", None)
        saves_all = not native.args.save_only_model
        if self._engine is not None:
            return held_engine.training_of(
                self._engine,
                values,
                schedulers=native.lr_scheduler,
                extra={MODEL_FILES: {}, **(extra or {})},  # there always, since a restore needs to know
                parts=("model", "extra", *(("optimizer", "scheduler", "scaler") if saves_all else ())),
            )
        return TrainingState(
            model=native.model,
            optimizer=getattr(optimizer, "optimizer", optimizer) if saves_all else None,
            scheduler=native.lr_scheduler if saves_all else None,
            scaler=scaler if saves_all else None,
            extra=extra,
            rank_values=values,
            frozen=self._frozen,
        )

    def _finish_saves(self, *, finished: bool = False) -> None:
        """Waits for the saves of this run. `finished`: see `Checkpointer.close`. Raises `StoreError` if the newest failed."""
        if self._checkpointer is not None:
            self._checkpointer.close(finished=finished)
            self._named.finish()

    def _folder(self, step: int | None, trial: Any = None) -> Path:
        return Path(self._native._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def _ref_of(self, trial: Any) -> str:
        """The branch; that of a trial is named after its folder."""
        return self._ref if trial is None else f"{self._ref}/{Path(self._native._get_output_dir(trial=trial)).name}"


class Trainer(SnapshotMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer, which saves into a store: see `SnapshotMixin`."""


@short_errors
def attach(
    trainer: transformers.Trainer,
    *,
    store: Store | str | os.PathLike[str],
    ref: str,
    asynchronous: bool = True,
    save_base: bool = False,
    frozen_base: bool = False,
    on_exception: bool = True,
) -> None:
    """Makes an existing Trainer, of any subclass, save into a store. The other arguments and the errors are those of `SnapshotMixin`.

    Raises:
        InvalidOptionError: it saves into a store already.
    """
    options = {"asynchronous": asynchronous, "save_base": save_base, "frozen_base": frozen_base, "on_exception": on_exception}
    begin = partial(SnapshotMixin._use_store, trainer, store, ref, **options)
    mix_in(trainer, SnapshotMixin, transformers.Trainer, begin, title="Trainer", expected="a transformers.Trainer")
