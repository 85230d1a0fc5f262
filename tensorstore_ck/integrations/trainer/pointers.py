"""The small file that names a snapshot, where a trainer expects a checkpoint.

A trainer looks for checkpoints by path, counts them and deletes them. All that a resume needs is in the store, so a pointer that is lost or
left over does no harm. A pointer has the step while a save is in progress, and the root once it is published.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.replace_file import replace_file
from tensorstore_ck.errors import InputError, InvalidNameError, MismatchError, NotFoundError, StoreError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.training.checkpointing.pending_saves import saved_by

MAX_BYTES: Final = 1 << 16
"""A longer file is no pointer."""


class SnapshotPointer(NamedTuple):
    """The snapshot that a pointer file names."""

    store: str
    """URL, without credentials."""
    address: str
    """``ref@step``; or, once the save has ended, the root."""
    run: str = ""
    """With ``ref@step``: the `Checkpointer.run` that saves it; another process may have published that step later."""

    def encode(self) -> str:
        """The text of the file."""
        return json.dumps({name: value for name, value in self._asdict().items() if value}, indent=2)

    @classmethod
    def decode(cls, text: str | bytes, path: str) -> "SnapshotPointer":
        """The snapshot that the text of the file at `path` names. Raises `InputError` if it names none."""
        try:
            match parse_json(text):
                case {"store": str(store), "address": str(address), **more} if isinstance(run := more.get("run", ""), str):
                    return cls(store, address, run)
            reason = "it has no store and address"
        except ValueError as exc:
            reason = str(exc)
        raise InputError(f"{path} does not name a snapshot: {reason}. Resume from the store by ref@step", object_id=path)

    def address_in(self, store: ReadOnlyStore, path: str) -> str:
        """The address in `store` of the snapshot that the pointer at `path` names.

        A root becomes an address through its ref, if there is one: a run that restores it continues the ref.

        Raises:
            MismatchError: it names a step of another store.
            NotFoundError: its save was never published, and another process has saved that step.
        """
        if self.store != store.url and "@" in self.address:  # a root is the same snapshot anywhere
            raise MismatchError(
                f"{path} names a snapshot of {self.store}, and this Trainer's store is {store.url}: pass ref@step of this store",
                object_id=path,
            )
        try:
            snapshot = store.resolve(self.address)
        except NotFoundError:
            return self.address
        if self.run and saved_by(store, snapshot) != self.run:
            raise NotFoundError(
                f"{path} names a save that was never published: {self.address} is what a later process saved. Resume from another folder, "
                f"or pass {self.address!r} if you mean that snapshot",
                object_id=path,
            )
        through_ref = address_through_ref(store, snapshot, snapshot.ref)
        return self.address if through_ref == snapshot.root else through_ref


def address_through_ref(store: ReadOnlyStore, snapshot: Snapshot, ref: str, back: int = 0) -> str:
    """An address of a snapshot through a branch, so that a run that restores it continues the branch; its root, if there is none.

    `back`: how many parents it may be behind the branch's newest snapshot, if it has no step of its own.
    """
    steps = [] if snapshot.step is None else [f"{ref}@{snapshot.step}"]
    for address in (*steps, f"{ref}~{back}"):
        with suppress(NotFoundError, InvalidNameError):
            if store.resolve(address).root == snapshot.root:
                return address
    return snapshot.root


def note_at(store: ReadOnlyStore, root: str, key: str) -> dict[str, Any]:
    """The note under `key` in a snapshot's metadata, where an adapter saved one; empty if it did not."""
    note = store.metadata(root).get(key)
    return note if isinstance(note, dict) else {}


def newest_noted(store: ReadOnlyStore, ref: str, key: str, entry: tuple[str, str], steps: Sequence[int | None] | None = None) -> str | None:
    """The address of a branch's newest snapshot whose note under `key` has an `entry`, name and value; None: there is none.

    `steps`: read the notes of snapshots with these steps only.
    """
    try:
        history = store.log(ref)
    except NotFoundError:
        return None  # nothing was saved yet
    for back, snapshot in enumerate(history):
        with suppress(NotFoundError):  # it was deleted meanwhile
            if (steps is None or snapshot.step in steps) and note_at(store, snapshot.root, key).get(entry[0]) == entry[1]:
                return address_through_ref(store, snapshot, ref, back)
    return None


def is_there(store: ReadOnlyStore, address: str) -> bool:
    """Whether there is a snapshot at an address."""
    try:
        store.resolve(address)
    except NotFoundError:
        return False
    return True


POINTER: Final = "snapshot.json"


def read_pointer(folder: str | os.PathLike[str]) -> SnapshotPointer | None:
    """The snapshot that a folder names; None if the trainer wrote the folder. Raises `InputError` if the file cannot be read."""
    path = Path(folder) / POINTER
    try:
        return SnapshotPointer.decode(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise InputError(f"{path} does not name a snapshot: {exc}. Resume from the store by ref@step", object_id=str(path)) from exc


def write_pointer(folder: str | os.PathLike[str], pointer: SnapshotPointer) -> None:
    """Writes or replaces what a folder names."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    replace_file(Path(folder) / POINTER, pointer.encode().encode())


def remove_pointer(folder: str | os.PathLike[str]) -> None:
    """Removes the pointer, and its folder unless it has other files: a user may save under one name again and again."""
    (Path(folder) / POINTER).unlink(missing_ok=True)
    with suppress(OSError):
        Path(folder).rmdir()


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
