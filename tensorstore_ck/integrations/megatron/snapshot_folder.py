"""The folder that names a snapshot, in place of a checkpoint: written by a save, or later from what the store has."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, maybe_load_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from tensorstore_ck.common.replace_file import replace_file
from tensorstore_ck.errors import ConflictError
from tensorstore_ck.integrations.trainer.attach import all_ranks
from tensorstore_ck.integrations.trainer.pointers import SnapshotPointer, read_pointer, write_pointer
from tensorstore_ck.store import Store
from tensorstore_ck.training.rank_group import ask_first_rank
from tensorstore_ck.training.resume_search import ResumeSearch

BACKEND: Final = "tsck"
"""The name of the backend in the ``metadata.json`` of a folder."""
VERSION: Final = 1
_DCP_METADATA: Final = ".metadata"
"""The metadata file of a checkpoint that torch's DCP has written."""
TRACKER: Final = "latest_checkpointed_iteration.txt"
"""Megatron-LM's file that names the iteration to load."""


def other_backend(folder: str | Path) -> str | None:
    """The backend of a complete checkpoint that another strategy wrote into a folder; None: there is none."""
    config = _config_of(folder)
    if config is not None:
        return None if config.sharded_backend == BACKEND else str(config.sharded_backend)
    # A save was killed while it wrote the file. A save to a store has written the pointer before that.
    is_unknown = (Path(folder) / CONFIG_FNAME).exists() and read_pointer(folder) is None
    return "an unknown backend" if is_unknown else None


def is_of_store(folder: str | Path) -> bool:
    """Whether a folder is a checkpoint that is a snapshot of a store."""
    return (Path(folder) / CONFIG_FNAME).exists() and other_backend(folder) is None


def version_of(folder: str | Path) -> int:
    """The version of the form of a folder that names a snapshot; `VERSION` if no file says it."""
    config = _config_of(folder)
    return VERSION if config is None else int(config.sharded_backend_version)


def _config_of(folder: str | Path) -> CheckpointingConfig | None:
    """None: there is none, or it cannot be read."""
    try:
        return maybe_load_config(str(folder))
    except (ValueError, TypeError, AttributeError):
        return None


def has_dcp_metadata(folder: str | Path) -> bool:
    """Whether torch's DCP has saved into a folder since a save to a store began, which removes that file."""
    return (Path(folder) / _DCP_METADATA).exists()


def end_other_checkpoint(folder: str | Path) -> None:
    """A checkpoint of another strategy ends before anything of it is replaced."""
    if other_backend(folder):
        (Path(folder) / CONFIG_FNAME).unlink()
    (Path(folder) / _DCP_METADATA).unlink(missing_ok=True)


def name_snapshot(store: Store, folder: Path, root: str) -> None:
    """Makes a folder name a snapshot; Megatron writes ``metadata.json`` afterwards."""
    write_pointer(folder, SnapshotPointer(store.url, root))
    (folder / COMMON_STATE_FNAME).unlink(missing_ok=True)


def latest_folder(parent: Path) -> Path | None:
    """The folder of the iteration that Megatron-LM's file names; None: there is none."""
    try:
        return _folder_of(parent, int((parent / TRACKER).read_text()))
    except (OSError, ValueError):
        return None


def _folder_of(parent: Path, iteration: int) -> Path:
    return parent / f"iter_{iteration:07d}"


def write_folder(store: Store, ref: str, parent: Path, address: str | None) -> Path | None:
    """See `Strategies.write_folder`; on all ranks."""
    group = all_ranks(also_one=True)
    chosen = (
        ResumeSearch(store, ref, group, advice="pass an earlier one as address, or {} to accept it").next_address()
        if address is None
        else address
    )
    if chosen is None:
        return None

    def write() -> bytes:
        snapshot = store.resolve(chosen)
        folder = _folder_of(parent, snapshot.step) if snapshot.step is not None else parent / snapshot.root[:16]
        is_unnamed = has_dcp_metadata(folder) and not (folder / CONFIG_FNAME).exists()  # Megatron-LM's torch_dcp and fsdp_dtensor
        if backend := other_backend(folder) or ("torch's DCP" if is_unnamed else None):
            raise ConflictError(f"{folder} has a checkpoint of {backend}: remove it, or write to another folder", object_id=str(folder))
        name_snapshot(store, folder, snapshot.root)
        replace_file(folder / CONFIG_FNAME, json.dumps(asdict(CheckpointingConfig(BACKEND, VERSION))).encode())
        if snapshot.step is not None:
            replace_file(parent / TRACKER, str(snapshot.step).encode())
        return str(folder).encode()

    return Path(ask_first_rank(store, group, f"the folder of {chosen}", write).decode())
