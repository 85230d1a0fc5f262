"""`register` lets Megatron save into a store, and load from it."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.integrations.megatron.compatibility import require_supported
from tensorstore_ck.integrations.megatron.load_strategy import LoadStrategy
from tensorstore_ck.integrations.megatron.safe_types import register_safe_types
from tensorstore_ck.integrations.megatron.save_strategy import SaveStrategy
from tensorstore_ck.integrations.megatron.snapshot_folder import write_folder
from tensorstore_ck.integrations.megatron.version import has_registry
from tensorstore_ck.integrations.trainer.attach import opened
from tensorstore_ck.log.field_checks import validate_ref_name
from tensorstore_ck.store import Store
from tensorstore_ck.training.checkpointing.pending_saves import note_finished

if has_registry():
    from tensorstore_ck.integrations.megatron import registered_strategies as _versions
else:
    from tensorstore_ck.integrations.megatron import redirected_calls as _versions  # type: ignore[no-redef]


@short_errors
class Strategies(NamedTuple):
    """The strategies that `register` has added; `close`, or the end of a with statement, waits for saves and closes the store."""

    save: SaveStrategy
    """For ``dist_checkpointing.save(..., sharded_strategy=)``; in Megatron-core 0.16 ``("tsck", 1)`` means the same."""
    load: LoadStrategy
    """The strategy that ``dist_checkpointing.load`` takes for a folder that `save` wrote."""
    store: Store
    ref: str

    def changed_by(self, optimizer: Any) -> None:
        """Names the optimizer that alone changes its parameters and state, in ``step``; a later call replaces it.

        Then asynchronous saves copy those on CUDA devices while the next passes run: see `Store.put_snapshot_async`.

        Args:
            optimizer: Megatron's, or one of torch.
        """
        self.save.changed_by = torch_optimizers(optimizer)

    def write_folder(self, parent: str | os.PathLike[str], address: str | None = None) -> Path | None:
        """Writes a folder that names a snapshot, ``iter_0001000``, and Megatron-LM's file that names the iteration to load; on all ranks.

        For a job whose folders are lost, that was killed between a save and its folder, or that begins with an imported snapshot.

        Args:
            parent: The folder of checkpoint folders.
            address: The snapshot; None: the newest one of the ref that is not marked. Nothing of it is read here, and a load of the folder
                takes this snapshot and no other one: if it is damaged, pass an earlier one.

        Returns:
            The folder; None: the ref has no snapshots.

        Raises:
            NotFoundError: there is no such snapshot.
            CorruptObjectError: all of the ref's snapshots are marked.
            ConflictError: the folder has a checkpoint that another strategy wrote.
        """
        return write_folder(self.store, self.ref, Path(parent), address)

    def close(self, *, finished: bool = False) -> None:
        """Waits for saves, and closes the store.

        Args:
            finished: The training has reached its end: calls `Store.finish`, on the first rank. The end of a ``with`` block without an
                error passes true.
        """
        notes_end, self.save.has_named = finished and self.save.has_named, False
        if notes_end and not self.store.drain().dropped:
            note_finished(self.store, self.ref)
        self.store.close()

    def __enter__(self) -> "Strategies":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finished=kind is None)


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of torch in an optimizer of Megatron."""
    if hasattr(optimizer, "chained_optimizers"):
        return [inner for one in optimizer.chained_optimizers for inner in torch_optimizers(one)]
    inner = getattr(optimizer, "optimizer", optimizer)
    return [inner] if isinstance(inner, torch.optim.Optimizer) else []


@short_errors
def register(store: Store | str | os.PathLike[str], *, ref: str) -> Strategies:
    """Lets Megatron save into a store and load from it.

    Call it once in each process, on all ranks. Then ``dist_checkpointing.save(state, folder, registered.save)`` saves into the store, where
    `registered` is what this returns, and ``dist_checkpointing.load(state, folder)`` loads folders of this and of other backends.
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
    require_supported(_versions.USED)
    validate_ref_name(ref)
    register_safe_types()
    used = opened(store)
    save, load = SaveStrategy(used, ref), LoadStrategy(used)
    _versions.route_to_store(save, load)
    return Strategies(save, load, used, ref)
