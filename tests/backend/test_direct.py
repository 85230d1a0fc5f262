"""A large file goes past the page cache where the kernel writes to a disk of this host: also in a container's own folders, on overlay."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.local_writer import DirectWriter

MOUNT = """set -e
mount -t tmpfs tmpfs memory
for kind in disk memory; do
    mkdir $kind/lower $kind/upper $kind/work $kind-overlay
    mount -t overlay overlay -o lowerdir=$kind/lower,upperdir=$kind/upper,workdir=$kind/work $kind-overlay
done
exec "$@"
"""
SAYS_ALIGNMENT = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 1) if sys.platform == "linux" else False


def is_direct(folder: Path) -> bool:
    writer = LocalBackend(str(folder)).open_writer("packs/1")
    writer.append([b"x"])
    writer.abort()
    return isinstance(writer, DirectWriter)


def in_own_mounts(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    (folder / "disk").mkdir()
    (folder / "memory").mkdir()
    entered = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNT, "sh"]
    return subprocess.run([*entered, *command], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not SAYS_ALIGNMENT, reason="Linux says how O_DIRECT must be aligned from 6.1 on")
def test_on_overlay_it_goes_by_the_folder_below(tmp_path: Path) -> None:
    done = in_own_mounts(tmp_path, sys.executable, __file__, "disk-overlay", "memory", "memory-overlay")
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no mounts of one's own here: {done.stderr}")
    assert done.stdout.split() == [str(is_direct(tmp_path / "disk")), "False", "False"], done.stderr


if __name__ == "__main__":
    print(*(is_direct(Path(folder).resolve()) for folder in sys.argv[1:]))
