"""`register` adds the backend "tsck" to Megatron's strategies."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy, register_default_strategy

from tensorstore_ck.integrations.megatron.compatibility import require_supported
from tensorstore_ck.integrations.megatron.load_strategy import CommonLoadStrategy, LoadStrategy
from tensorstore_ck.integrations.megatron.safe_types import register_safe_types
from tensorstore_ck.integrations.megatron.save_strategy import CommonSaveStrategy, SaveStrategy
from tensorstore_ck.integrations.megatron.snapshot_folder import BACKEND, VERSION, write_folder
from tensorstore_ck.log.ref_names import validate_ref_name
from tensorstore_ck.store import Store
from tensorstore_ck.store import open as open_store


class Strategies(NamedTuple):
    """What `register` has added; `close`, or the end of a with statement, waits for saves and closes the store."""

    save: SaveStrategy
    """Also ``("tsck", 1)``, for ``dist_checkpointing.save(..., sharded_strategy=)``."""
    load: LoadStrategy
    """What ``dist_checkpointing.load`` takes for a folder that `save` wrote."""
    store: Store
    ref: str

    def write_folder(self, parent: str | os.PathLike[str], address: str | None = None) -> Path | None:
        """Writes a folder that names a snapshot, ``iter_0001000``, and Megatron-LM's file that names the iteration to load; on all ranks.

        For a job whose folders are lost, that was killed between a save and its folder, or that begins with an imported snapshot.

        Args:
            parent: The folder of checkpoint folders.
            address: The snapshot; None: the newest intact one of the ref.

        Returns:
            The folder; None: the ref has no snapshots.

        Raises:
            NotFoundError: there is no such snapshot.
            CorruptObjectError: none of the ref's snapshots can be restored.
            ConflictError: the folder has a checkpoint that another strategy wrote.
        """
        return write_folder(self.store, self.ref, Path(parent), address)

    def close(self) -> None:
        """Waits for saves, and closes the store."""
        self.store.close()

    def __enter__(self) -> "Strategies":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def register(store: Store | str | os.PathLike[str], *, ref: str) -> Strategies:
    """Adds the backend "tsck" to Megatron's strategies: ``dist_checkpointing.save(state, folder, ("tsck", 1))`` saves into the store.

    Call it once in each process, on all ranks. ``dist_checkpointing.load(state, folder)`` then loads folders of this and of other backends.
    A second call replaces the first one's store and ref.

    Args:
        store: The store; or its URL or path, where it is created if there is none.
        ref: The branch of this job's snapshots.

    Returns:
        The strategies, for callers that take objects, such as Megatron-LM's ``checkpointing_context["save_strategy"]``.

    Raises:
        InvalidNameError: `ref` is no valid name.
        MissingExtraError: Megatron-core has another version than those that are supported.
    """
    require_supported()
    validate_ref_name(ref)
    register_safe_types()
    opened = store if isinstance(store, Store) else open_store(store, create=True)
    save, load = SaveStrategy(opened, ref), LoadStrategy(opened)
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, save)
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, load)
    register_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1, CommonLoadStrategy(load, _stock(StrategyAction.LOAD_COMMON)))
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, CommonSaveStrategy(_stock(StrategyAction.SAVE_COMMON)))
    return Strategies(save, load, opened, ref)


def _stock(action: StrategyAction) -> Any:
    """Megatron's own strategy, also at a second `register`."""
    found: Any = get_default_strategy(action, "torch", 1)
    return found.stock if isinstance(found, CommonLoadStrategy | CommonSaveStrategy) else found
