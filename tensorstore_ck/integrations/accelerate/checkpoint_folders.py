"""The folders of accelerate's checkpoints: those that it wrote, and those that name a snapshot."""

import re
import shutil
from pathlib import Path
from typing import Final

from tensorstore_ck.integrations.trainer.pointers import read_pointer

AUTOMATIC: Final = re.compile(r"checkpoint_(\d+)")


def is_native(folder: Path) -> bool:
    """Whether accelerate wrote it: generators are among the last of its files."""
    return any(folder.glob("random_states_*.pkl"))


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Folders of automatic naming, in their order; none if `folder` does not exist."""
    return sorted((int(match[1]), path) for path in folder.glob("checkpoint_*") if (match := AUTOMATIC.fullmatch(path.name)))


def rotate(folder: Path, limit: int) -> None:
    """Deletes light folders beyond the limit; not those that accelerate wrote."""
    light = [path for _, path in numbered(folder) if read_pointer(path) is not None]
    for path in light[: max(0, len(light) - limit)]:
        shutil.rmtree(path, ignore_errors=True)
