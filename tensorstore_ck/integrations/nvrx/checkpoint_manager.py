"""`LocalCheckpointManager`: NVRx's manager of local checkpoints, which keeps them in a store instead of pickled files.

NVRx decides which checkpoints are complete on all ranks, replicates them and retrieves them. Its own manager loads pickles,
renames files that are not durable yet, and fails where one file is damaged, although another rank has a replica.
"""

import os
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any, Final

from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import BaseCheckpointManager, CheckpointingException, CkptID
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import ExchangePlan, GroupWrapper
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import NoReplicasAvailableError, ReplicationStrategy

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import DamageError, InvalidOptionError, NotFoundError, StoreError
from tensorstore_ck.integrations.nvrx.rank_store import RankStore
from tensorstore_ck.integrations.trainer.versions import Package, changed_functions

PACKAGE: Final = Package(
    title="NVRx", name="nvidia-resiliency-ext", lowest=(0, 4), above=(0, 8), tested="nvidia-resiliency-ext>=0.4.1,<=0.7.0"
)
ABSTRACT: Final = frozenset({"_cleanup", "_cleanup_failed_save", "_load", "_my_ckpt_ids", "_save"})
"""The methods that a manager must define."""
USED: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (BaseCheckpointManager, ("session_id", "repl_strategy")),
    (BaseCheckpointManager.find_latest, ("self",)),
    (BaseCheckpointManager.load, ("self",)),
    (BaseCheckpointManager.save, ("self", "state_dict", "iteration", "is_async")),
    (BaseCheckpointManager._ckpt_id, ("self", "iteration")),
    (BaseCheckpointManager._load_fn, ("self", "ckpt_id")),
    (ReplicationStrategy.retrieve_plan, ("self", "globally_available_ids", "wanted")),
    (ExchangePlan.required_ids, ("self", "rank")),
    (GroupWrapper.all_gather_object, ("self", "my_obj")),
)
"""Functions of NVRx that this module calls or overrides -> the parameters that they must have."""


def require_supported() -> None:
    """Checks the installed NVRx. Raises `MissingExtraError` if its version is not supported, or a name that is used has changed."""
    installed = version("nvidia-resiliency-ext")
    PACKAGE.require_version(installed)
    changed = [*changed_functions(USED)]
    if BaseCheckpointManager.__abstractmethods__ != ABSTRACT:
        changed.append(BaseCheckpointManager.__qualname__)
    PACKAGE.require_unchanged(installed, changed)


_NONE: Final = -1
"""NVRx's iteration for "there is none"."""


class LocalCheckpointUnavailableError(NotFoundError, CheckpointingException):  # type: ignore[misc]
    """The local checkpoint that `find_latest` found cannot be loaded on some rank, and nobody has another replica."""


@short_errors
class LocalCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Replaces NVRx's `LocalCheckpointManager`, with its arguments; `save`, `find_latest` and `load` keep their meaning::

        manager = tsck.nvrx.LocalCheckpointManager("/nvme/local", repl_strategy=LazyCliqueReplicationStrategy(8, 2))

    A checkpoint counts once it is durable. State dicts may be NVRx's `BasicTensorAwareStateDict`, Megatron-core's
    `MCoreTensorAwareStateDict`, and any class that was registered with `tsck.register_type`.
    """

    latest_iteration: int

    def __init__(
        self, root_local_ckpt_dir: str | os.PathLike[str], session_id: str = "", repl_strategy: ReplicationStrategy | None = None
    ) -> None:
        """All ranks make one.

        Args:
            root_local_ckpt_dir: A folder on a disk, or a tmpfs, of this host. The store of a rank is in ``SESSION_ID/RANK`` below it.
            session_id: Keeps the checkpoints of several jobs in one folder apart.
            repl_strategy: NVRx's strategy of replication; None: no replicas.

        Raises:
            InvalidOptionError: `session_id` leads out of the folder.
            MissingExtraError: NVRx has another version than those that are supported.
        """
        require_supported()
        if not isinstance(session_id, str) or PurePath(session_id).is_absolute() or ".." in PurePath(session_id).parts:
            raise InvalidOptionError(f"session_id= must be a relative path without '..', not {session_id!r}", object_id="session_id")
        super().__init__(session_id, repl_strategy)
        self.root_local_ckpt_dir = root_local_ckpt_dir
        self._opened: RankStore | None = None

    @property
    def local_ckpt_dir(self) -> Path:
        """The folder of this rank; after `init_process_group`."""
        return Path(self.root_local_ckpt_dir, self.session_id, str(self.rank))

    @property
    def _own(self) -> RankStore:
        if self._opened is None:
            self._opened = RankStore(self.local_ckpt_dir, self.session_id)
        return self._opened

    def load(self) -> tuple[TensorAwareStateDict, CkptID]:
        """Loads what `find_latest` found; on all ranks. If a copy is damaged, another rank's replica is used.

        Returns:
            This rank's state dict, and its id.

        Raises:
            CheckpointingException: `find_latest` was not called, or found nothing.
            LocalCheckpointUnavailableError: a rank has no copy that can be read; raised on all ranks. The next `find_latest` does not
                find this iteration.
        """
        if self.latest_iteration == _NONE:
            super().load()  # raises NVRx's error
        iteration: int = self.find_latest()  # what it found before
        wanted: CkptID = self._ckpt_id(iteration)
        while True:
            held, plan, problem = self._read(wanted)
            problems = [reported for reported in GroupWrapper().all_gather_object(problem) if reported is not None]
            if not problems:
                break
            self.latest_iteration = _NONE
            newest = self.find_latest()
            if newest != iteration or not all(is_damage for is_damage, _ in problems):
                others = f"the newest that is complete is of iteration {newest}" if newest != _NONE else "there is no other"
                raise LocalCheckpointUnavailableError(
                    f"the local checkpoint of iteration {iteration} cannot be loaded: {'; '.join(text for _, text in problems)}. "
                    f"Of the local checkpoints, {others}: call find_latest() again, or load a global checkpoint",
                    object_id=str(self.local_ckpt_dir),
                )
        if plan is None:
            return held[wanted], wanted
        return self.repl_strategy.retrieve_execute(plan, held)[wanted], wanted

    def _read(self, wanted: CkptID) -> tuple[dict[CkptID, TensorAwareStateDict], ExchangePlan | None, tuple[bool, str] | None]:
        """The parts of its store that this rank needs, or sends; the plan of the exchange; whether it is damaged, and the reason."""
        plan: ExchangePlan | None = None
        try:
            if self.repl_strategy is not None:
                plan = self.repl_strategy.retrieve_plan(self.globally_available_ids, [wanted])
            needed = [wanted] if plan is None else sorted(plan.required_ids())
            return {ckpt_id: self._load_fn(ckpt_id) for ckpt_id in needed}, plan, None
        except (StoreError, NoReplicasAvailableError) as exc:
            return {}, plan, (isinstance(exc, DamageError), f"rank {self.rank}: {exc}")

    # --- what NVRx calls ----------------------------------------------------------------------------------------------

    def _my_ckpt_ids(self) -> list[CkptID]:
        return self._own.ids()

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        return self._own.load(ckpt_id)

    @short_errors
    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        self._own.save(state_dict, ckpt_id)

    def _cleanup(self, iteration: int) -> None:
        self._delete(before=iteration)

    def _cleanup_failed_save(self, iteration: int) -> None:
        self._delete(iteration=iteration)

    def _delete(self, *, iteration: int | None = None, before: int | None = None) -> None:
        """A checkpoint that cannot be deleted stops no job: the next save tries again."""
        try:
            self._own.delete(iteration=iteration, before=before)
        except StoreError as exc:
            warnings.warn(f"earlier local checkpoints in {self.local_ckpt_dir} still take space: {exc}", stacklevel=2)
