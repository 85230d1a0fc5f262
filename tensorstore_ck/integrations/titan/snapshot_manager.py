"""`SnapshotManager`: torchtitan's checkpoint manager over a store. torchtitan's options keep their meaning.

Natively each save is a folder of its own, random number generators are lost, and `keep_latest_k` deletes folders in the background. Here a
save is one snapshot of all ranks, with their generators, and `keep_latest_k` is a policy of the ref.

torchtitan's `state_dict` splits fused projections (``wqkv``) into copies, which the optimizer's states do not fit, and numbers nothing:
stages of a pipeline have different names, so that they make one model again. So a snapshot has the parameters and buffers of all model
parts as one module, by their own names.
"""

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.utils.data import DataLoader
from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER, TRAIN_STATE, AsyncMode, CheckpointManager
from torchtitan.observability import structured_logger
from torchtitan.tools.logging import logger

from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError, MismatchError, NotFoundError, StoreError
from tensorstore_ck.integrations.trainer.attach import all_ranks, opened
from tensorstore_ck.integrations.trainer.saves import future_of, new_checkpointer
from tensorstore_ck.log.field_checks import validate_ref_name
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.checkpointing import Checkpointer
from tensorstore_ck.training.parameter_names import walk
from tensorstore_ck.training.rank_group import ask_first_rank
from tensorstore_ck.training.resume_search import ResumeSearch
from tensorstore_ck.training.state_sides import PARTS

IN_STORE: Final = "tsck://"
"""`initial_load_path` of a snapshot in the store: ``tsck://runs/base@1000``."""
_NOTE: Final = "torchtitan"
"""The key of a snapshot's metadata under which its kind is: weights only, or all."""
_WEIGHTS_ONLY: Final = {"weights_only": True}


class _Restored:
    """Takes a part of a snapshot; it has no state of its own, since reading that of a data loader may start its workers."""

    def __init__(self, take: Callable[[Any], object]) -> None:
        self.load_state_dict = take

    def state_dict(self) -> dict[str, Any]:
        return {}


@short_errors
class SnapshotManager(CheckpointManager):  # type: ignore[misc]
    """For ``checkpoint=SnapshotManager.Config(...)`` in a `torchtitan.trainer.Trainer.Config`."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's options of its CheckpointManager, and the store."""

        enable: bool = True
        """Whether to save and load."""

        store: str = ""
        """Path or URL of the store, which is created if there is none."""

        ref: str = ""
        """The branch that the run saves to, and resumes from."""

        keep: Annotated[dict[str, Any] | None, tyro.conf.Suppress] = None
        """The retention policy of the ref, as in `Store.set_policy`, instead of `keep_latest_k`."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """Opens the store; torchtitan calls it.

        Raises:
            InvalidOptionError: `store` or `ref` is missing, or an option is not supported.
            ValueError: see torchtitan.
        """
        self._checkpointer: Checkpointer | None = None
        self._lent: DataLoader[Any] | None = None
        native = copy.copy(config)
        native.keep_latest_k, native.async_mode = 0, "disabled"  # neither its thread that deletes folders, nor another process group
        super().__init__(
            native,
            dataloader=dataloader,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states=states,
            sd_adapter=sd_adapter,
            base_folder=base_folder,
        )
        if not self.enable:
            return
        self.keep_latest_k, self.async_mode = config.keep_latest_k, AsyncMode(config.async_mode)
        missing = [name for name in ("store", "ref") if not getattr(config, name)]
        if missing:
            raise InvalidOptionError(
                f"checkpoint.{missing[0]} is missing: where are snapshots saved?", object_id=f"checkpoint.{missing[0]}"
            )
        unknown = [name for name in self.exclude_from_loading if name not in self.states]
        if unknown:
            known = ", ".join(sorted(set(self.states) - {MODEL}))
            raise InvalidOptionError(
                f"checkpoint.exclude_from_loading has {unknown[0]!r}, and there is only {known}",
                object_id="checkpoint.exclude_from_loading",
            )
        if dist.is_initialized() and dist.get_backend() == "fake":
            raise InvalidOptionError("nothing can be saved in comm.mode fake_backend: turn checkpoint.enable off", object_id="comm.mode")
        self._parts, self._ref, self._keep = model_parts, config.ref, config.keep
        validate_ref_name(config.ref)
        self._store = opened(config.store)

    def __del__(self) -> None:
        """Nothing: `close` waits for other ranks, which a finalizer must not."""

    @property
    def _group(self) -> "dist.ProcessGroup | None":
        """Also of a single rank, whose parameters are DTensors, too."""
        return all_ranks(also_one=True)

    def _training(self, *, restores: bool = False) -> TrainingState:
        """The state to save; with `restores`, the state to restore, without excluded parts."""
        optimizers, own = self.states[OPTIMIZER], {TRAIN_STATE: self.states.get(TRAIN_STATE)}
        is_container = isinstance(optimizers, Iterable)
        others = {key: held for key, held in self.states.items() if key not in {MODEL, TRAIN_STATE} and held is not None}
        if is_container:
            del others[OPTIMIZER]
        if restores:
            for states in (own, others):
                for key in states.keys() & self.exclude_from_loading:
                    states[key] = _Restored(lambda _: None)
            if isinstance(others.get(DATALOADER), DataLoader):
                others[DATALOADER] = _Restored(others[DATALOADER].load_state_dict)
        trained = [*optimizers] if is_container else []
        return TrainingState(
            model=weights_of(self._parts),
            optimizer=trained[0] if len(trained) == 1 else trained or None,
            extra=others,
            rank_values={key: held for key, held in own.items() if held is not None},
        )

    # --- save ---------------------------------------------------------------------------------------------------------

    @short_errors
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        structured_logger.add_step_tag("checkpoint_save")
        with structured_logger.log_trace_span("checkpoint_save"):
            if last_step and self.last_save_model_only:
                return self._save_weights(curr_step)
            if self._checkpointer is None:
                self._checkpointer = self._new_checkpointer(self._training(), asynchronous=self.async_mode != AsyncMode.DISABLED)
            saved = self._checkpointer.step(curr_step)
            self.save_future = future_of(saved) if isinstance(saved, PendingSnapshot) else None
            if last_step:
                self._finish_saves(finished=True)
            return saved is not None

    def _save_weights(self, step: int) -> bool:
        """The last save of a run, in `export_dtype`. The files come first: the snapshot says that the run has ended."""
        self._finish_saves()
        if self.last_save_in_hf:
            self._save_last_step(step)
        state = TrainingState(model=weights_of(self._parts, self.export_dtype))
        with self._new_checkpointer(state, asynchronous=False) as checkpointer:
            return checkpointer.step(step, metadata={_NOTE: _WEIGHTS_ONLY}) is not None

    def _new_checkpointer(self, state: TrainingState, *, asynchronous: bool) -> Checkpointer:
        keep = self._keep
        if keep is None and self.keep_latest_k > 0:
            keep = {"keep_last": self.keep_latest_k}
        options: dict[str, Any] = {"group": self._group, "keep": keep, "asynchronous": asynchronous}
        return new_checkpointer(self._store, state, self._ref, argument="checkpoint.load_step, or leave it out,", **options)

    def _finish_saves(self, *, finished: bool = False) -> None:
        self.save_future = None
        if self._checkpointer is not None:
            checkpointer, self._checkpointer = self._checkpointer, None
            checkpointer.close(finished=finished)

    @short_errors
    def _wait_for_saving(self) -> None:
        self.save_future = None
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def _maybe_wait_for_staging(self) -> None:
        """A save has its copy when `_save` returns. torchtitan calls this in each step, after it has begun to iterate."""
        if self._lent is not None:
            self._lent.generator = None
            self._lent = None

    @short_errors
    def _close(self) -> None:
        self._finish_saves()
        self._store.close()

    # --- load ---------------------------------------------------------------------------------------------------------

    @short_errors
    def _load(self, step: int = -1) -> bool:
        with structured_logger.log_trace_span("checkpoint_load"):
            self._finish_saves()
            address = self._ref if step == -1 else f"{self._ref}@{step}"
            exists = step == -1 or self._ask(f"whether {self._ref!r} exists", lambda: self._ref in self._store.branches())
            loads_snapshot = exists and self._load_snapshot(address, named=step != -1)
            return loads_snapshot or self._load_initial(step)

    def _load_snapshot(self, address: str, *, named: bool) -> bool:
        """False: the ref has no snapshots yet."""
        advice = "set checkpoint.load_step to an earlier step, or to that of {} to accept it"
        search = ResumeSearch(self._store, address, self._group, advice=advice)
        ended = ""
        while (candidate := self._next_address(search, ended)) is not None:
            try:
                saved_step, is_weights_only = self._describe(candidate)
                if not is_weights_only or saved_step == 0:
                    self._restore(candidate, weights_only=saved_step == 0)
                    return True
            except StoreError as exc:
                search.note_failure(exc)
                continue
            here = f"{self._ref}@{saved_step}"
            reason = (
                f"a run has ended with {here}, which has only its weights (checkpoint.last_save_model_only): to train on from "
                f'them, pass checkpoint.initial_load_path="{IN_STORE}{here}" and another checkpoint.ref'
            )
            if named:
                raise MismatchError(reason, object_id=address)
            ended = ended or reason
            search.skip(reason)
        return False

    @staticmethod
    def _next_address(search: ResumeSearch, ended: str) -> str | None:
        try:
            return search.next_address()
        except CorruptObjectError as exc:
            if not ended:
                raise
            raise MismatchError(ended, object_id=exc.object_id) from exc

    def _describe(self, address: str) -> tuple[int | None, bool]:
        """Step of a snapshot, and whether it has nothing but weights."""

        def look() -> list[Any]:
            snapshot = self._store.resolve(address)
            return [snapshot.step, self._store.metadata(snapshot.root).get(_NOTE) == _WEIGHTS_ONLY]

        step, is_weights_only = self._ask(f"what {address!r} has", look)
        return step, is_weights_only

    def _ask(self, title: str, look: Callable[[], Any]) -> Any:
        """The first rank's result of `look`."""
        return parse_json(ask_first_rank(self._store, self._group, title, lambda: json.dumps(look()).encode()))

    def _restore(self, address: str, *, weights_only: bool) -> None:
        logger.info(f"Loading {address} from {self._store.url}.")
        excluded = {"optimizer"} & set(self.exclude_from_loading)
        parts = ["model"] if weights_only else [part for part in PARTS if part not in excluded]
        restored = self._training(restores=True).restore(self._store, address, group=self._group, parts=parts)
        if restored is None:
            raise NotFoundError(f"there is no snapshot {address!r} in {self._store.url}", object_id=address)
        loader = None if weights_only else self.states[DATALOADER]
        if isinstance(loader, DataLoader) and loader.generator is None:
            # an iterator over a loader draws a number when it is made, which the restored generators had drawn before they were saved
            loader.generator, self._lent = torch.Generator(), loader

    def _load_initial(self, step: int) -> bool:
        """Loads what torchtitan loads while it has no checkpoint, or a snapshot of another run."""
        path = self.initial_load_path
        if step != -1 or not (path and path.startswith(IN_STORE)):
            loaded: bool = super()._load(step)
            return loaded
        self._restore(path.removeprefix(IN_STORE), weights_only=self.initial_load_model_only)
        return True


def weights_of(parts: Sequence[nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    """A module that has the parameters and buffers of `parts`, the models or stages of this rank, and none of their hooks.

    With a `dtype`, floating-point ones are copied into it; without, they are those of `parts`, also if a buffer is replaced later.
    """
    weights = nn.Module()
    copies: dict[int, nn.Parameter] = {}  # tied parameters stay tied

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()

    for part in parts:
        for prefix, module in walk(part, ""):
            parameters = [*module.named_parameters(recurse=False, remove_duplicate=False)]
            if not parameters and not module._buffers:
                continue
            own = _child(weights, prefix)
            for name, parameter in parameters:
                if dtype is not None and id(parameter) not in copies:
                    copies[id(parameter)] = nn.Parameter(copied(parameter), requires_grad=False)
                own.register_parameter(name, copies.get(id(parameter), parameter))
            own._non_persistent_buffers_set = own._non_persistent_buffers_set | module._non_persistent_buffers_set
            if dtype is not None:
                copies_here = {name: None if buffer is None else copied(buffer) for name, buffer in module._buffers.items()}
                own._buffers = {**own._buffers, **copies_here}
            else:
                own._buffers = {**own._buffers, **module._buffers} if own._buffers else module._buffers
    return weights


def _child(module: nn.Module, prefix: str) -> nn.Module:
    """The submodule with this prefix, such as ``layers.0.``."""
    for name in prefix.split(".")[:-1]:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module
