"""A file is replaced at once, and nothing is written through a link."""

import os
import secrets
from pathlib import Path

import pytest

from tensorstore_ck.common.replace_file import replace_file


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    for name in ("file", f".file.{os.getpid()}", f"file.{os.getpid()}"):
        (tmp_path / name).symlink_to("victim")
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()


def test_a_guessed_name_is_not_used_and_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".file.guessed").symlink_to("victim")
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "victim").read_text() == "precious"
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", b"new")
    assert {path.name for path in tmp_path.iterdir()} <= {"victim", "folder", ".file.guessed"}
