"""Another user of this host: their files, and what they create in a staging folder.

As root the kernel is asked; else this process is taken for root, and what files were given away is remembered.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorstore_ck.common import owned_files

OTHER = 1234
UNSENT = "unsent/packs/0A/01ARZ3NDEKTSV4RRFFQ69G5F0A"
FILES = {
    "pack": UNSENT,
    "part": "unsent/parts/0B/01ARZ3NDEKTSV4RRFFQ69G5F0B",
    "record": "unsent/snapshots/0C/01ARZ3NDEKTSV4RRFFQ69G5F0C",
    "temporary": "unsent/parts/0B/.tmp-01ARZ3NDEKTSV4RRFFQ69G5F0D",
    "manifest": "staged/01ARZ3NDEKTSV4RRFFQ69G5F0C-0",
    "journal": "uploads/01ARZ3NDEKTSV4RRFFQ69G5F0A",
    "copy": "copies/packs/0E/01ARZ3NDEKTSV4RRFFQ69G5F0E",
    "lock": "users",
}
FOLDERS = {
    "root": "",
    "unsent": "unsent",
    "packs": "unsent/packs",
    "shard": "unsent/packs/0A",
    "staged": "staged",
    "uploads": "uploads",
    "copies": "copies",
    "copied packs": "copies/packs",
}


class Users:
    """Who owns what: as far as this process sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._owners: dict[int, int] | None = None if os.geteuid() == 0 else {}
        if self._owners is not None:
            self._pretend(monkeypatch, self._owners)

    def give(self, path: Path, owner: int = OTHER) -> None:
        """Makes a file, folder or link theirs."""
        os.chown(path, owner, -1, follow_symlinks=False)

    def give_all(self, path: Path) -> None:
        for each in (path, *path.rglob("*")):
            self.give(each)

    def owner(self, path: Path) -> int:
        found = os.lstat(path)
        return found.st_uid if self._owners is None else self._owners.get(found.st_ino, 0)

    def owners(self, path: Path) -> set[int]:
        return {self.owner(each) for each in (path, *path.rglob("*"))}

    def _pretend(self, monkeypatch: pytest.MonkeyPatch, owners: dict[int, int]) -> None:
        require = owned_files._require_owner

        def seen(found: os.stat_result, path: str, owner: int) -> None:
            require(os.stat_result((*found[:4], owners.get(found.st_ino, 0), *found[5:])), path, owner)

        def chown(path: str | Path, owner: int, group: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
            owners[os.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks).st_ino] = owner

        def fchown(fd: int, owner: int, group: int) -> None:
            owners[os.fstat(fd).st_ino] = owner

        monkeypatch.setattr(owned_files, "_require_owner", seen)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(os, "chown", chown)
        monkeypatch.setattr(os, "fchown", fchown)


def make_tree(root: Path) -> None:
    """A staging folder with one of each."""
    root.mkdir(mode=0o700)
    for name in FILES.values():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    for each in (root, *root.rglob("*")):
        each.chmod(0o700 if each.is_dir() else 0o600)


def link(path: Path, precious: Path, users: Users) -> None:
    """A link to another folder of the victim replaces it."""
    target = precious if path.is_dir() else precious / "notes"
    _remove(path)
    path.symlink_to(target)


def hard_link(path: Path, precious: Path, users: Users) -> None:
    """It is a second name of what the victim has elsewhere."""
    _remove(path)
    path.hardlink_to(precious / "notes")


def fifo(path: Path, precious: Path, users: Users) -> None:
    """A process that opens it waits."""
    _remove(path)
    os.mkfifo(path)


def other_owner(path: Path, precious: Path, users: Users) -> None:
    """It is theirs."""
    users.give(path)


Attack = Callable[[Path, Path, Users], None]
ON_FOLDERS: dict[str, Attack] = {"link": link, "fifo": fifo, "other owner": other_owner}
ON_FILES: dict[str, Attack] = {**ON_FOLDERS, "hard link": hard_link}


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
