"""Saves a sharded state dict as one snapshot of all ranks, and writes the small file that names it.

Megatron writes the common state into ``common.pt`` before it calls a strategy, and ``metadata.json`` after it. The first rank moves the
common state into the snapshot; once that is published it writes ``snapshot.json`` and removes ``common.pt``. So a folder that has
``metadata.json`` names a snapshot, and everything that is loaded comes from that.
"""

import fcntl
import os
import re
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from tensorstore_ck.integrations.light_folders import write_pointer
from tensorstore_ck.integrations.megatron.load_strategy import BACKEND, VERSION
from tensorstore_ck.integrations.megatron.sharded_state import COMMON, state_of
from tensorstore_ck.integrations.trainer_pointers import SnapshotPointer
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.store import Store

_NUMBER: Final = re.compile(r"([0-9]{1,18})/?$")


class SaveStrategy(AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Saves sharded tensors and objects, and the common state, into a store."""

    def __init__(self, store: Store, ref: str) -> None:
        super().__init__(BACKEND, VERSION)
        self._store, self._ref = store, ref

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: no file is needed besides the snapshot."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Returns when the snapshot is published; on all ranks.

        Raises:
            StoreError: see `Store.put_snapshot`; nothing was published.
        """
        folder, options = Path(checkpoint_dir), self._options(sharded_state_dict, checkpoint_dir)
        self._name(folder, self._store.retrying(lambda: self._store.put_snapshot(**options)))

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        """Returns as soon as the state may change; a thread of this process does the rest. On all ranks.

        The process that Megatron's queue starts for `async_fn` only waits for that thread, so that the queue knows when a save has ended.

        Raises:
            StoreError: see `Store.put_snapshot_async`.
        """
        pending = self._store.put_snapshot_async(**self._options(sharded_state_dict, checkpoint_dir))
        return AsyncRequest(wait_until_unlocked, (_locked_until_settled(pending),), [partial(self._finish, Path(checkpoint_dir), pending)])

    def _options(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> dict[str, Any]:
        """The arguments of a save; its step is the number at the end of the folder's name."""
        state = state_of(sharded_state_dict)
        if dist.get_rank() == 0:
            state[COMMON] = torch.load(Path(checkpoint_dir) / COMMON_STATE_FNAME, map_location="cpu")
        number = _NUMBER.search(str(checkpoint_dir))
        return {"state": state, "ref": self._ref, "step": None if number is None else int(number[1]), "group": dist.group.WORLD}

    def _finish(self, folder: Path, pending: PendingSnapshot) -> None:
        """Called by Megatron before it writes ``metadata.json``.

        Raises:
            StoreError: the save failed; nothing of it is visible.
        """
        self._name(folder, pending.wait())

    def _name(self, folder: Path, snapshot: Snapshot) -> None:
        if dist.get_rank() == 0:
            write_pointer(folder, SnapshotPointer(self._store.url, snapshot.root))
            (folder / COMMON_STATE_FNAME).unlink(missing_ok=True)


def _locked_until_settled(pending: PendingSnapshot) -> str:
    """A file that this process holds a lock on until the save has ended. The kernel takes the lock back if the process dies."""
    descriptor, path = tempfile.mkstemp(prefix="tsck-save-")
    fcntl.lockf(descriptor, fcntl.LOCK_EX)

    def release(_: PendingSnapshot) -> None:
        Path(path).unlink(missing_ok=True)
        os.close(descriptor)

    pending.published.on_settled(release)
    return path


def wait_until_unlocked(path: str) -> None:
    """Waits in another process for a save; in the process that saves it returns at once."""
    with suppress(FileNotFoundError), Path(path).open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
