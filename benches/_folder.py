"""The folder of a bench."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Makes `folder`, and deletes it at the end. Ends the bench if something is in it: that is not the bench's to delete."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: name a new folder, which the bench makes and then deletes")
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
