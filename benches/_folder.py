"""The folder of a bench."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Makes `folder`, and deletes it at the end. Ends the bench if it exists: what is in it is not the bench's to delete."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise SystemExit(f"{folder} exists: name a new folder, which the bench makes and then deletes") from None
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
