"""A disk of a few megabytes: a tmpfs, which root can mount."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_mount = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="needs root, to mount a small tmpfs")


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A new `folder` on a disk of that size, such as ``"4m"``.

    Raises:
        OSError: this user may not mount one.
    """
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False)
    if mounted.returncode:
        raise OSError(f"cannot mount a tmpfs here: {mounted.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
