"""The pointers that name the saves of a run: by the step while a save is in progress, by the root once it is published."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tensorstore_ck.common.replace_file import replace_file
from tensorstore_ck.errors import InputError, StoreError
from tensorstore_ck.integrations.trainer.pointers import SnapshotPointer, read_pointer, remove_pointer, write_pointer
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save import PendingSnapshot

AnyPath = str | os.PathLike[str]


class PointerFiles(NamedTuple):
    """How pointers are read, written and removed."""

    read: Callable[[AnyPath], SnapshotPointer | None]
    write: Callable[[AnyPath, SnapshotPointer], None]
    remove: Callable[[AnyPath], None]


FOLDERS: Final = PointerFiles(read_pointer, write_pointer, remove_pointer)


class _Unfinished(NamedTuple):
    pending: PendingSnapshot
    pointer: SnapshotPointer
    paths: Sequence[AnyPath]
    latest: Path | None


class NamedSaves:
    """The saves of one run, in the process that writes its files."""

    def __init__(self, files: PointerFiles = FOLDERS) -> None:
        self._files = files
        self._unfinished: list[_Unfinished] = []

    def name(
        self, saved: Snapshot | PendingSnapshot, paths: Sequence[AnyPath], store_url: str, ref: str, *, run: str, latest: Path | None = None
    ) -> None:
        """Writes pointers at `paths` that name a save of a `Checkpointer.run`.

        `latest` is a file for the name of the last path, written once the save is published.
        """
        if isinstance(saved, Snapshot):
            self._write(SnapshotPointer(store_url, saved.root), paths, latest)
            return
        pointer = SnapshotPointer(store_url, f"{ref}@{saved.step}", run)
        self._write(pointer, paths)
        self._unfinished.append(_Unfinished(saved, pointer, paths, latest))

    def finish(self) -> None:
        """Lets pointers name the roots of saves that have ended; removes those of saves that failed."""
        ended = [save for save in self._unfinished if save.pending.done()]
        self._unfinished = [save for save in self._unfinished if save not in ended]
        for pending, pointer, paths, latest in ended:
            left = [path for path in paths if self._read(path) == pointer]  # else the user or a later save has removed or replaced it
            try:
                root = pending.wait().root
            except StoreError:  # the Checkpointer has warned
                for path in left:
                    self._files.remove(path)
            else:
                self._write(SnapshotPointer(pointer.store, root), left, latest)

    def _write(self, pointer: SnapshotPointer, paths: Sequence[AnyPath], latest: Path | None = None) -> None:
        for path in paths:
            self._files.write(path, pointer)
        if paths and latest is not None:
            replace_file(latest, Path(paths[-1]).name.encode())

    def _read(self, path: AnyPath) -> SnapshotPointer | None:
        try:
            return self._files.read(path)
        except InputError:
            return None
