"""A folder that was deleted and made again is another one, even where the filesystem gives it the same inode."""

import os
from pathlib import Path

from tensorstore_ck.common import folder_identity as module
from tensorstore_ck.common.folder_identity import folder_identity


def test_a_folder_keeps_its_identity_and_a_new_one_gets_another(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    identity = folder_identity(str(folder))
    (folder / "store.json").write_text("{}")
    folder.chmod(0o700)
    assert folder_identity(str(folder.rename(tmp_path / "moved"))) == identity != 0
    assert folder_identity(str(folder)) == 0
    seen = set()
    for _ in range(20):  # of which some get an inode again
        folder.mkdir()
        seen.add((folder_identity(str(folder)), os.stat(folder).st_ino, module._made_ns(str(folder))))
        folder.rmdir()
    made = [made_ns for _, _, made_ns in seen]
    assert (
        None in made
        or len({identity for identity, _, _ in seen}) == len(set(zip((inode for _, inode, _ in seen), made, strict=True))) == 20
    )
