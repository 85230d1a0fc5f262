"""Whether a job that resumed from a local checkpoint, and has restored nothing of the store, may go on with a ref."""

import os
from pathlib import Path
from typing import Any

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.errors import StoreError
from tensorstore_ck.integrations.megatron.snapshot_folder import latest_folder, other_backend
from tensorstore_ck.integrations.trainer.pointer_folders import read_pointer
from tensorstore_ck.log.address import resolve
from tensorstore_ck.store import Store
from tensorstore_ck.store.internals import log_of


def head_before_local_checkpoint(store: Store, ref: str, parent: Path, common_state: Any) -> Digest | None:
    """The root of the ref's head, if the job's local checkpoint came after it; None: the ref is not the job's to move.

    Megatron-LM keeps its arguments in the common state: the folder that the job loads from, and the iteration that it began with, which is
    0 in a new job and in one that only takes the weights. The head must be what the newest folder there names, which Megatron-LM would
    have loaded, were there no local checkpoint. So a job that was given up for dead does not move the ref of its successor, whose saves
    came after.

    Args:
        store: The store.
        ref: The branch.
        parent: The folder of the checkpoint folder that the job saves to.
        common_state: Of the save.
    """
    arguments = common_state.get("args") if isinstance(common_state, dict) else None
    load, began_with = getattr(arguments, "load", None), getattr(arguments, "iteration", None)
    if not (isinstance(load, str) and isinstance(began_with, int) and os.path.realpath(load) == os.path.realpath(parent)):
        return None
    latest = latest_folder(parent)
    if latest is None or other_backend(latest):
        return None
    try:
        pointer = read_pointer(latest)
        if pointer is None:
            return None
        found = resolve(log_of(store).newest_view(), pointer.address_in(store, str(latest)))
    except StoreError:
        return None  # the save meets the same, and says so
    is_head = found.branch == ref and found.info.root == found.branch_root
    return found.info.root if is_head and found.info.step is not None and found.info.step <= began_with else None
