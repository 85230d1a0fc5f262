"""Saves a sharded state dict as one snapshot of all ranks, and writes the small file that names it.

Megatron writes the common state into ``common.pt`` before it calls a strategy, or, since 0.19, gives it as a sharded object, and writes
``metadata.json`` after it. The first rank moves the common state into the snapshot; once that is published it writes ``snapshot.json`` and
removes ``common.pt``. So a folder whose ``metadata.json`` names this backend names a snapshot, from which everything is loaded.
"""

import fcntl
import os
import pickle
import re
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import StoreError, UnsupportedValueError
from tensorstore_ck.integrations.megatron.compatibility import SaveBase, request_class
from tensorstore_ck.integrations.megatron.snapshot_folder import (
    BACKEND,
    VERSION,
    end_other_checkpoint,
    latest_folder,
    name_snapshot,
    other_backend,
)
from tensorstore_ck.integrations.megatron.stored_state import state_of
from tensorstore_ck.integrations.megatron.version import has_registry, keeps_common_state_as_object
from tensorstore_ck.integrations.megatron_layout import COMMON, COMMON_OBJECT
from tensorstore_ck.integrations.trainer.pointers import read_pointer
from tensorstore_ck.log.address import resolve
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.redaction import one_line
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.session.save.rank_round import UnpreparedState
from tensorstore_ck.store import Store
from tensorstore_ck.store.internals import continue_ref, knows_ref, log_of
from tensorstore_ck.training.rank_group import ask_first_rank

_NUMBER: Final = re.compile(r"([0-9]{1,18})/?$")


@short_errors
class SaveStrategy(SaveBase):  # type: ignore[misc]
    """Saves sharded tensors and objects, and the common state, into a store."""

    _named: ClassVar[set[str]] = set()
    """The folders that all strategies of this process have saved into: Megatron's wrapper hides which one it was."""

    def __init__(self, store: Store, ref: str) -> None:
        super().__init__(BACKEND, VERSION)
        self._store, self._ref, self._is_first = store, ref, True
        self.changed_by: list[torch.optim.Optimizer] = []
        """See `Strategies.changed_by`."""
        self.has_named = False
        """Whether this is the first rank, and has named a snapshot of its job: then it notes the end of the run."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: the snapshot needs no other file."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Returns when the snapshot is published; on all ranks. Raises `StoreError`: see `Store.put_snapshot`; nothing was published."""
        folder, options = Path(checkpoint_dir), self._options(sharded_state_dict, checkpoint_dir)
        self._name(folder, self._store.retrying(lambda: self._store.put_snapshot(**options)))

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path, async_strategy: str = "mcore") -> Any:
        """Returns as soon as the state may change; a thread of this process does the rest. On all ranks.

        The process that Megatron's queue starts for `async_fn` only waits for that thread, so that the queue knows when a save has ended.

        Args:
            sharded_state_dict: Megatron's.
            checkpoint_dir: The folder.
            async_strategy: Since Megatron-core 0.17: whose queue takes the request, "mcore" or "nvrx".

        Returns:
            The `AsyncRequest` of that queue.

        Raises:
            StoreError: see `Store.put_snapshot_async`.
        """
        make_request = request_class(async_strategy)
        pending = self._store.put_snapshot_async(**self._options(sharded_state_dict, checkpoint_dir), changed_by=self.changed_by)
        finish = partial(self._finish, Path(checkpoint_dir), pending)
        return make_request(wait_until_unlocked, (_locked_until_settled(pending),), [finish], {})

    def _options(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> dict[str, Any]:
        """The arguments of a save; its step is the number at the end of the folder's name."""
        state: dict[str, Any] | UnpreparedState
        attributes = {}
        try:
            state = state_of(sharded_state_dict)
            if dist.get_rank() == 0:
                state[COMMON] = _common_state(state, Path(checkpoint_dir) / COMMON_STATE_FNAME)
                attributes = _attributes(state[COMMON])
                end_other_checkpoint(checkpoint_dir)
        except Exception as exc:  # noqa: BLE001 - the save raises it; the other ranks would wait for this one
            state = UnpreparedState(exc)
        if self._is_first:
            self._is_first = False
            self._continue_ref(Path(checkpoint_dir), state)
        number = _NUMBER.search(str(checkpoint_dir))
        step = None if number is None else int(number[1])
        return {"state": state, "ref": self._ref, "step": step, "attributes": attributes, "group": dist.group.WORLD}

    def _continue_ref(self, checkpoint_dir: Path, state: dict[str, Any] | UnpreparedState) -> None:
        """At the first save: see `head_before_local_checkpoint`. The first rank decides."""

        def head() -> bytes:
            if knows_ref(self._store, self._ref) or isinstance(state, UnpreparedState):
                return b""
            return head_before_local_checkpoint(self._store, self._ref, checkpoint_dir.parent, state[COMMON]) or b""

        root = ask_first_rank(self._store, dist.group.WORLD, f"the first save to {self._ref!r}", head)
        if root:
            continue_ref(self._store, self._ref, Digest(root))

    def _finish(self, folder: Path, pending: PendingSnapshot) -> None:
        """Called by Megatron before it writes ``metadata.json``. Raises `StoreError` if the save failed; nothing of it is visible."""
        self._name(folder, pending.wait())

    def _name(self, folder: Path, snapshot: Snapshot) -> None:
        if dist.get_rank() == 0:
            name_snapshot(self._store, folder, snapshot.root)
            self.has_named = True
            if not has_registry():  # in 0.16 the wrapper names the backend of what it wraps
                self._named.add(str(folder))

    @classmethod
    def take_named(cls, folder: str | Path) -> bool:
        """Whether a strategy of this process has saved into a folder since the last call for it. For Megatron, before ``metadata.json``."""
        is_named = str(Path(folder)) in cls._named
        cls._named.discard(str(Path(folder)))
        return is_named


def _attributes(common_state: Any) -> dict[str, float]:
    """What to search snapshots by, of the arguments that Megatron-LM keeps in the common state."""
    arguments = common_state.get("args") if isinstance(common_state, dict) else None
    samples = getattr(arguments, "consumed_train_samples", None)
    return {"samples_seen": float(samples)} if isinstance(samples, int) else {}


def _common_state(state: dict[str, Any], path: Path) -> Any:
    """Takes what Megatron keeps as an object out of the state (0.19); else what it has just written."""
    if keeps_common_state_as_object() and COMMON_OBJECT in state:
        return state.pop(COMMON_OBJECT)
    try:
        return torch.load(path, map_location="cpu")
    except pickle.UnpicklingError as exc:
        raise UnsupportedValueError(
            f"the common state holds what torch.load refuses ({one_line(str(exc))[:300]}): store plain values, or list the type with "
            "torch.serialization.add_safe_globals and tsck.register_type",
            object_id=str(path),
        ) from exc


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


def head_before_local_checkpoint(store: Store, ref: str, parent: Path, common_state: Any) -> Digest | None:
    """The root of the ref's head, if the job's local checkpoint came after it; None: the ref is not the job's to move.

    Megatron-LM keeps its arguments in the common state: the folder that the job loads from, and the iteration that it began with, which is
    0 in a new job and in one that only takes the weights. The head must be what the newest folder there names, which Megatron-LM would
    have loaded, were there no local checkpoint. So a job that was given up for dead does not move the ref of its successor, whose saves
    came after.

    `parent`: the folder of the checkpoint folder that the job saves to. `common_state`: that of the save.
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
        resolved = resolve(log_of(store).newest_view(), pointer.address_in(store, str(latest)))
    except StoreError:
        return None  # the save meets the same, and says so
    is_head = resolved.branch == ref and resolved.info.root == resolved.branch_root
    return resolved.info.root if is_head and resolved.info.step is not None and resolved.info.step <= began_with else None
