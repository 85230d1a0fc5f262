"""`attach` makes a DeepSpeed engine save into a store: `save_checkpoint` and `load_checkpoint` keep their arguments and what they return.

Natively each rank writes its own files, and ``latest`` may name a step that not all of them have written; a checkpoint fits the ZeRO stage
and the number of ranks that saved it. Here a save is one snapshot of all ranks, published at once, which fits any stage and number.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.integrations.deepspeed.compatibility import require_supported
from tensorstore_ck.integrations.deepspeed.engine_state import partitioned, training_of
from tensorstore_ck.integrations.deepspeed_names import CLIENT_STATE, LATEST, NOTE
from tensorstore_ck.integrations.trainer.attach import all_ranks, opened
from tensorstore_ck.integrations.trainer.attach import attach as mix_in
from tensorstore_ck.integrations.trainer.pointers import NamedSaves, is_there, newest_noted, note_at, read_pointer
from tensorstore_ck.integrations.trainer.saves import new_checkpointer
from tensorstore_ck.log.field_checks import validate_ref_name
from tensorstore_ck.store import Store
from tensorstore_ck.training.checkpointing import Checkpointer
from tensorstore_ck.training.per_rank_state import GENERATORS, VALUES
from tensorstore_ck.training.rank_group import ask_first_rank
from tensorstore_ck.training.resume_search import ResumeSearch


@short_errors
class SnapshotMixin:
    """Mixed into the class of a `DeepSpeedEngine`: see `attach`."""

    _snapshots: "_Snapshots"

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves weights, masters, moments, schedule, loss scale, counters and generators; on all ranks.

        Args:
            save_dir: A folder for small files that name the snapshots, as DeepSpeed lays them out: ``TAG/snapshot.json`` and ``latest``.
            tag: A name for `load_checkpoint`; by default ``global_stepN``. If ranks pass different tags, and DeepSpeed's configuration
                allows that, the first rank's counts.
            client_state: Any other values of each rank; on another number of ranks, all ranks get those of the first one.
            save_latest: Write ``latest``, once the snapshot is published.
            exclude_frozen_parameters: Leave out parameters that are not trained.

        Returns:
            Whether it was saved, or is being saved; False after a failure that was a warning.

        Raises:
            ConflictError: the ref has snapshots of another run, and this one began without `load_checkpoint`.
            StoreError: the save failed permanently; see `Checkpointer`.
        """
        if not save_dir:
            raise ValueError(f"save_dir must name a folder, not {save_dir!r}")  # as DeepSpeed
        return self._snapshots.save(Path(save_dir), tag, client_state, save_latest=save_latest, excludes_frozen=exclude_frozen_parameters)

    def load_checkpoint(  # noqa: PLR0917 - as in DeepSpeed
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
    ) -> tuple[str | None, Any]:
        """Restores what `save_checkpoint` saved, on any ZeRO stage and any number of ranks.

        Args:
            load_dir: A folder of `save_checkpoint`; a checkpoint in it that DeepSpeed wrote is loaded as DeepSpeed does.
            tag: The tag of a save; or an address in the store, such as ``runs/x@10``. A branch means its newest intact snapshot. None:
                that of the ref; if it has none, what DeepSpeed loads.
            load_module_strict: Whether stored weights must be exactly the model's.
            load_optimizer_states: Restore masters, moments and options of the optimizer; else masters follow from the weights.
            load_lr_scheduler_states: Restore the schedule.
            load_module_only: Restore weights and nothing else.
            custom_load_fn: For a checkpoint that DeepSpeed wrote.

        Returns:
            What was loaded, and its client state; (None, None) if there is nothing yet.

        Raises:
            NotFoundError: there is no such snapshot.
            MismatchError: it does not fit.
            DamageError: it is damaged; of a branch: all are.
        """
        snapshots = self._snapshots
        snapshots.finish()
        parts = {"model", "optimizer", "scheduler", "scaler", "extra", VALUES, GENERATORS}
        parts -= set() if load_optimizer_states else {"optimizer", "scaler"}
        parts -= set() if load_lr_scheduler_states else {"scheduler"}
        parts = {"model"} if load_module_only else parts
        search = snapshots.search(Path(load_dir), tag)

        def restore(address: str) -> tuple[str | None, Any]:
            if custom_load_fn is not None:
                raise InvalidOptionError(
                    f"custom_load_fn= cannot load the snapshot {address}: read its weights with store.checkout(..., select=['model.*'])",
                    object_id="custom_load_fn",
                )
            return snapshots.restore(Path(load_dir), address, parts, strict=load_module_strict)

        restored = None if search is None else search.restore(restore)
        if restored is not None:
            return restored
        loaded: tuple[str | None, Any] = super().load_checkpoint(  # type: ignore[misc]
            os.fspath(load_dir), tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        )
        return loaded

    def destroy(self) -> None:
        """Waits for the saves, then see DeepSpeed. Raises `StoreError` if the newest save failed."""
        try:
            self._snapshots.finish()
        finally:
            super().destroy()  # type: ignore[misc]


class _Snapshots:
    def __init__(self, engine: Any, store: Store, ref: str, *, asynchronous: bool, keep: Mapping[str, object] | None) -> None:
        self._engine, self._store, self._ref, self._asynchronous, self._keep = engine, store, ref, asynchronous, keep
        self._values: dict[str, Any] = {CLIENT_STATE: {}}
        self._state, self._shared = training_of(engine, self._values)
        self._checkpointer: Checkpointer | None = None
        self._named = NamedSaves()

    @property
    def _group(self) -> "dist.ProcessGroup | None":
        return all_ranks(also_one=True)

    # --- save ---------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, tag: str | None, client_state: Mapping[str, Any], *, save_latest: bool, excludes_frozen: bool) -> bool:
        engine = self._engine
        step = engine.global_steps
        tag = f"global_step{step}" if tag is None else str(tag)
        engine._checkpoint_tag_validation(tag)  # by `checkpoint.tag_validation` of the configuration
        tag = ask_first_rank(self._store, self._group, f"the tag of step {step}", tag.encode).decode()
        if engine.micro_steps % engine.gradient_accumulation_steps():
            warnings.warn("saved between the micro-batches of a step, whose gradients so far are not saved", stacklevel=3)
        if self._checkpointer is None:
            options: dict[str, Any] = {"group": self._group, "keep": self._keep, "asynchronous": self._asynchronous}
            self._checkpointer = new_checkpointer(self._store, self._state, self._ref, argument="load_checkpoint()", **options)
        self._values[CLIENT_STATE] = dict(client_state)
        self._shared.saves_frozen = not excludes_frozen
        with partitioned(self._engine):
            saved = self._checkpointer.step(step, metadata={NOTE: {"tag": tag}})
        self._named.finish()
        if saved is not None and not engine.global_rank:
            latest = folder / LATEST if save_latest else None
            self._named.name(saved, [folder / tag], self._store.url, self._ref, run=self._checkpointer.run, latest=latest)
        return saved is not None

    def finish(self) -> None:
        """Waits for the saves. Raises `StoreError` if the newest one failed."""
        checkpointer, self._checkpointer = self._checkpointer, None
        try:
            if checkpointer is not None:
                checkpointer.close()
        finally:
            self._named.finish()

    # --- load ---------------------------------------------------------------------------------------------------------

    def search(self, folder: Path, tag: str | None) -> ResumeSearch | None:
        """For the snapshot to load; None: DeepSpeed loads a checkpoint of its own."""
        address = self._ref if tag is None else self._address_of(folder, tag)
        missing = "" if tag is None else f"{address!r} is neither the tag nor the address of a snapshot in {self._store.url}"
        advice = "pass an earlier step, or tag={} to accept it"
        return ResumeSearch(self._store, address, self._group, advice=advice, missing=missing) if address else None

    def _address_of(self, folder: Path, tag: str) -> str:
        """The snapshot with a tag, on all ranks the same; empty: DeepSpeed loads a checkpoint of its own."""

        def look() -> bytes:
            pointer = read_pointer(folder / tag)
            if pointer is not None:
                address = pointer.address_in(self._store, str(folder / tag))
                return (address if is_there(self._store, address) else self._tagged(tag) or address).encode()
            if any((folder / tag).glob("*_states.pt")):
                return b""
            return (self._tagged(tag) or tag).encode()

        return ask_first_rank(self._store, self._group, f"the snapshot with the tag {tag!r}", look).decode()

    def _tagged(self, tag: str) -> str | None:
        """The address of the ref's newest snapshot with this tag."""
        return newest_noted(self._store, self._ref, NOTE, ("tag", tag))

    def restore(self, folder: Path, address: str, parts: set[str], *, strict: bool) -> tuple[str, dict[str, Any]]:
        """See `SnapshotMixin.load_checkpoint`; returns what was loaded and the client state."""
        self._shared.strict = strict
        try:
            with partitioned(self._engine):
                snapshot = self._state.restore(self._store, address, group=self._group, parts=parts)
        finally:
            self._shared.strict = True
        if snapshot is None:
            raise NotFoundError(f"{address} was deleted meanwhile", object_id=address)
        note = parse_json(ask_first_rank(self._store, self._group, f"the tag of {address}", lambda: self._note(snapshot.root)))
        return os.fspath(folder / str(note.get("tag", address))), self._values[CLIENT_STATE] if VALUES in parts else {}

    def _note(self, root: str) -> bytes:
        note = note_at(self._store, root, NOTE)
        return json.dumps({"tag": note["tag"]} if "tag" in note else {}).encode()


@short_errors
def attach(
    engine: DeepSpeedEngine,
    store: Store | str | os.PathLike[str],
    *,
    ref: str,
    asynchronous: bool = True,
    keep: Mapping[str, object] | None = None,
) -> None:
    """Makes `save_checkpoint` and `load_checkpoint` of an engine use a store. Call it after `deepspeed.initialize`, on all ranks.

    Args:
        engine: The engine.
        store: The store; or its URL or path, where it is created if there is none.
        ref: The branch.
        asynchronous: Save in the background; `destroy`, and the end of the process, wait for it.
        keep: The retention policy of the ref, as in `Store.set_policy`; what it drops is freed while the job runs.

    Raises:
        InvalidOptionError: it saves into a store already; or it has something that cannot be saved, such as tensor parallelism.
        InvalidNameError: `ref` is no valid name.
        MissingExtraError: DeepSpeed has another version than those that are supported.
    """

    def begin() -> None:
        require_supported(engine)
        validate_ref_name(ref)
        engine._snapshots = _Snapshots(engine, opened(store), ref, asynchronous=asynchronous, keep=keep)

    mix_in(engine, SnapshotMixin, DeepSpeedEngine, begin, title="engine", expected="the engine that deepspeed.initialize returns")
