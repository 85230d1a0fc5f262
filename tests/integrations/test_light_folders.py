"""Folders that name snapshots, where trainers look for checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck.errors import NoSpaceError
from tensorstore_ck.integrations.light_folders import PendingFolders, read_pointer, write_pointer
from tensorstore_ck.integrations.trainer_pointers import SnapshotPointer


class Failed:
    """A save that has failed."""

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        raise NoSpaceError("the disk is full", object_id="store")


@pytest.mark.parametrize("others", [("mp_rank_00_model_states.pt",), ()])
def test_a_failed_save_takes_only_its_pointer_away(tmp_path: Path, others: tuple[str, ...]) -> None:
    folder, latest = tmp_path / "out" / "last", tmp_path / "out" / "latest"
    write_pointer(folder, SnapshotPointer("store", "runs/a@2"))
    for name in others:
        (folder / name).write_bytes(b"of a trainer")
    folders, pending = PendingFolders(), Failed()
    folders.add(pending, folder, latest)  # type: ignore[arg-type]
    folders.finish("store")
    assert read_pointer(folder) is None
    assert folder.exists() == bool(others)
    assert all((folder / name).exists() for name in others)
    assert not latest.exists()
