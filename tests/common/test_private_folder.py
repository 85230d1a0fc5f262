"""A folder of one user, which several of his processes fill at the same time."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck.common.private_folder import PrivateFolder


def test_a_folder_that_another_process_makes_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, make = PrivateFolder(str(tmp_path / "own")), os.mkdir

    def overtaken(path: str, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        if path == "unsent/packs":
            make("unsent/packs/00", *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", overtaken)
    folder.make_folders("unsent/packs/00")
    monkeypatch.undo()
    assert (tmp_path / "own/unsent/packs/00").is_dir()
    folder.close()


def test_a_folder_whose_entry_was_not_made_durable_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, made, make = PrivateFolder(str(tmp_path / "own")), [], os.mkdir

    def mkdir(path: str, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        made.append(path)

    def fsync(fd: int) -> None:
        if len(made) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="error"):
        folder.make()
    folder.make()
    assert made == [str(tmp_path / "own")] * 2
    folder.close()
