"""Makes a LightningModule from a snapshot, as `LightningModule.load_from_checkpoint` does from a file of Lightning."""

import io
import os
from typing import Any, TypeVar

import torch

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.integrations.lightning.lightning_state import OWN, WEIGHTS
from tensorstore_ck.integrations.lightning.pointer_files import read_pointer
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.store import open as open_store
from tensorstore_ck.training.stored_training import read_training

Module = TypeVar("Module")


@short_errors
def load_from_checkpoint(
    kind: type[Module], path: str | os.PathLike[str], *, store: ReadOnlyStore | str | os.PathLike[str] | None = None, **options: Any
) -> Module:
    """A new module with the weights and hyperparameters of a snapshot.

    Args:
        kind: The class of the module.
        path: A file that names a snapshot, or an address in `store`.
        store: The store, or its path or URL; by default the one that the file names.
        options: For `kind.load_from_checkpoint`.

    Raises:
        InvalidOptionError: `path` is an address, and no store is given; or it is not of a Trainer of Lightning over a store.
        NotFoundError: there is no such snapshot.
    """
    pointer = read_pointer(path)
    if pointer is None and os.path.isfile(path):
        native = f"{kind.__name__}.load_from_checkpoint"
        raise InvalidOptionError(f"{path} names no snapshot: if Lightning wrote it, use {native}", object_id=str(path))
    if pointer is None and store is None:
        raise InvalidOptionError(f"{path} names no snapshot: for an address pass store=", object_id=str(path))
    if store is None or isinstance(store, str | os.PathLike):
        url = pointer.store if store is None and pointer is not None else store
        with open_store(url or "", read_only=True) as opened:
            return load_from_checkpoint(kind, path, store=opened, **options)
    address = str(path) if pointer is None else pointer.address_in(store, str(path))
    stored = read_training(store, address, parts=("model",))
    if OWN not in stored.rank_values:
        raise InvalidOptionError(f"{path} is not of a Trainer of Lightning", object_id=str(path))
    checkpoint = dict(stored.rank_values[OWN]["checkpoint"])
    checkpoint.setdefault(WEIGHTS, stored.shared.get("model", {}))
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    loaded: Module = kind.load_from_checkpoint(file, **{"weights_only": False, **options})  # type: ignore[attr-defined]
    return loaded
