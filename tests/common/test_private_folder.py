"""A folder of one user, which several of his processes fill at the same time."""

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
