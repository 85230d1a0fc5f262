"""Loads what a checkpoint folder names: the snapshot holds all of it, the common state too."""

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import CheckpointingException, ShardedObject, ShardedTensor

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.integrations.megatron.compatibility import LoadBase
from tensorstore_ck.integrations.megatron.snapshot_folder import BACKEND, VERSION, other_backend, version_of
from tensorstore_ck.integrations.megatron.stored_state import StoredState
from tensorstore_ck.integrations.trainer.pointers import POINTER, read_pointer
from tensorstore_ck.log.snapshot import Snapshot, refuse_marked
from tensorstore_ck.store import Store
from tensorstore_ck.store.internals import note_restored, open_content, resolve
from tensorstore_ck.training.rank_group import rank_and_world_size


class UnpublishedError(NotFoundError, CheckpointingException):  # type: ignore[misc]
    """A checkpoint folder names no snapshot that can be loaded."""


@short_errors
class LoadStrategy(LoadBase):  # type: ignore[misc]
    """Loads sharded tensors and objects; each rank reads its own pieces."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._opened: tuple[str, StoredState] | None = None
        """The root, and what it holds."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: the snapshot needs no other file."""
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Checks who wrote a folder. Raises `CheckpointingException` if another strategy did."""
        if loaded_backend != BACKEND:
            raise _of_another_backend(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Checks the version of a folder. Raises `CheckpointingException` if a newer release wrote it."""
        if loaded_version != VERSION:
            raise CheckpointingException(f"the folder has version {loaded_version} of the backend {BACKEND!r}: upgrade tensorstore_ck")

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path, async_strategy: str = "mcore") -> Any:
        """The state dict with the stored data in place of each sharded tensor and object.

        Raises:
            NotAsStoredError: something does not fit.
            UnpublishedError: the folder names no snapshot that can be loaded.
            DamageError: stored data is damaged.
        """
        stored = self.open(checkpoint_dir)
        wanted = list(nested_values(sharded_state_dict))
        stored.load_objects([item for item in wanted if isinstance(item, ShardedObject)])
        stored.load_tensors([item for item in wanted if isinstance(item, ShardedTensor)])
        return dict_list_map_outplace(lambda item: item.data, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Key -> the whole tensor, without data."""
        return dict(self.open(checkpoint_dir).tensors())

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Key -> the whole tensor or the object, without data."""
        stored = self.open(checkpoint_dir)
        return {**stored.objects(), **stored.tensors()}

    def open(self, checkpoint_dir: str | Path) -> StoredState:
        """The snapshot that a folder names, from which the registered ref then goes on.

        Raises:
            UnpublishedError: it names none, or one that the store does not have.
            CheckpointingException: another strategy wrote it.
            SnapshotMarkedBadError: it is marked as bad or damaged.
        """
        path = str(Path(checkpoint_dir) / POINTER)
        if backend := other_backend(checkpoint_dir):
            raise _of_another_backend(backend)
        self.check_version_compatibility(version_of(checkpoint_dir))
        pointer = read_pointer(checkpoint_dir)
        if pointer is None:
            raise UnpublishedError(
                f"{path} is missing: no snapshot was published for this folder; resume from an earlier one", object_id=path
            )
        try:
            resolved = resolve(self._store, pointer.address_in(self._store, path))
        except NotFoundError as exc:
            if pointer.store == self._store.url:
                why = "is not there: a policy or a person dropped it; resume from another one"
            else:
                why = f"the registered store {self._store.url} does not have: register the other one"
            raise UnpublishedError(
                f"{path} names the snapshot {pointer.address[:16]} of {pointer.store}, which {why}", object_id=path
            ) from exc
        refuse_marked(Snapshot.from_info(resolved.info), path, "resume from an earlier one")
        root = resolved.info.root.hex()
        if self._opened is None or self._opened[0] != root:
            content = open_content(self._store, resolved.info, rank_and_world_size())
            self._opened = root, StoredState(content, f"the snapshot that {path} names")
        note_restored(self._store, resolved)
        return self._opened[1]


def _of_another_backend(backend: str) -> CheckpointingException:
    return CheckpointingException(f"the folder was written with the backend {backend!r}: load it without this strategy")
