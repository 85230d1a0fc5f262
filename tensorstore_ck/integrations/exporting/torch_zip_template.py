"""Torch's zip files with room for the tensors' bytes, which are filled in later.

Torch itself pickles the state and lays the file out (`torch.serialization.skip_data`), so the file is what `torch.save` would have
written. CRC-32s are only known when the bytes are: `TorchZipTemplate.sealed` then puts them where zip readers look. Knows no store.
"""

import os
import pickle
import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.state.select import listed

_DESCRIPTOR: Final = b"PK\x07\x08"
_ENTRY: Final = b"PK\x01\x02"


class StorageGap(NamedTuple):
    """Where the bytes of one storage go."""

    offset: int
    storage: torch.UntypedStorage
    key: str

    @property
    def region(self) -> range:
        """In the file."""
        return range(self.offset, self.offset + self.storage.nbytes())


class TorchZipTemplate(NamedTuple):
    """A torch file without the bytes of its tensors."""

    pieces: list[tuple[int, bytearray]]
    """(offset, bytes) of everything between the rooms."""
    rooms: list[StorageGap]
    size_bytes: int

    def sealed(self, checksums: list[int]) -> list[tuple[int, bytearray]]:
        """The pieces, with the CRC-32 of each room in its place."""
        of_key = {room.key: checksum for room, checksum in zip(self.rooms, checksums, strict=True)}
        pieces = [(offset, bytearray(data)) for offset, data in self.pieces]
        behind = dict(pieces)
        for room, checksum in zip(self.rooms, checksums, strict=True):
            data = behind[room.region.stop]
            if data[:4] != _DESCRIPTOR:
                raise _strange("no checksum follows a tensor")
            struct.pack_into("<I", data, 4, checksum)
        offset, tail = pieces[-1]
        at = _directory_offset(offset, tail) - offset
        found = 0
        while tail[at : at + 4] == _ENTRY:
            name_length, *others = struct.unpack_from("<3H", tail, at + 28)
            folder, _, key = tail[at + 46 : at + 46 + name_length].decode().rpartition("/")
            if folder.endswith("/data") and key in of_key:
                struct.pack_into("<I", tail, at + 16, of_key[key])
                found += 1
            at += 46 + name_length + sum(others)
        if found != len(self.rooms):
            raise _strange(f"its directory has {found} of {len(self.rooms)} tensors")
        return pieces


def skeleton(state: object, path: str) -> TorchZipTemplate:
    """What `torch.save` makes of a state, with room for the bytes of its storages.

    Raises:
        UnsupportedValueError: torch cannot save it; `path` is what the message calls it.
    """
    file, pickling = _Recorder(), _Pickling()
    try:
        with torch.serialization.skip_data():
            torch.save(state, file, pickle_module=pickling)  # type: ignore[arg-type]
    except (RuntimeError, pickle.PicklingError, TypeError, KeyError, AttributeError) as exc:
        raise UnsupportedValueError(f"torch cannot save {path}: {exc}; leave that out with --exclude (exclude=)", object_id=path) from exc
    filled = [(key, storage) for key, storage in pickling.storages.items() if storage.nbytes()]
    if [storage.nbytes() for _, storage in filled] != [size for _, size in file.rooms]:
        raise _strange("it has other tensors than were saved")
    rooms = [StorageGap(offset, storage, key) for (offset, _), (key, storage) in zip(file.rooms, filled, strict=True)]
    return TorchZipTemplate(file.pieces, rooms, file.position)


def require_savable(tensors: Iterable[tuple[torch.Tensor, str]], shown: str) -> None:
    """Refuses tensors, by name, of dtypes that `torch.save` does not know.

    Raises:
        UnsupportedValueError: there are such.
    """
    known: dict[torch.dtype, bool] = {}
    unknown = []
    for tensor, name in tensors:
        if tensor.dtype not in known:
            try:
                skeleton(tensor.detach(), shown)
                known[tensor.dtype] = True
            except UnsupportedValueError:
                known[tensor.dtype] = False
        if not known[tensor.dtype]:
            unknown.append(f"{name} ({tensor.dtype})")
    if unknown:
        raise UnsupportedValueError(
            f"torch.save does not know the dtype of {listed(unknown)}: leave out what you do not need with --exclude NAME (exclude=)",
            object_id=unknown[0].partition(" ")[0],
        )


def _strange(what: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"torch {torch.__version__} lays its files out in a way that is unknown here ({what}): export with torch 2.13"
    )


def _directory_offset(start: int, tail: bytearray) -> int:
    """Of the zip's directory, in the file; `tail` is the end of it, from `start` on."""
    end = len(tail) - 22
    (offset,) = struct.unpack_from("<I", tail, end + 16)
    if offset != 0xFFFFFFFF:
        return int(offset)
    (record,) = struct.unpack_from("<Q", tail, end - 20 + 8)
    return int(struct.unpack_from("<Q", tail, record - start + 48)[0])


class _Recorder:
    """A file that remembers what is written, and where torch leaves room by seeking forward."""

    def __init__(self) -> None:
        self.position = 0
        self.pieces: list[tuple[int, bytearray]] = [(0, bytearray())]
        self.rooms: list[tuple[int, int]] = []

    def write(self, data: Any) -> int:
        self.pieces[-1][1].extend(data)
        self.position += len(data)
        return len(data)

    def seek(self, count: int, whence: int) -> int:
        assert whence == os.SEEK_CUR, "torch seeks forward over what it skips"
        self.rooms.append((self.position, count))
        self.position += count
        self.pieces.append((self.position, bytearray()))
        return self.position

    def flush(self) -> None:
        pass


class _Pickling:
    """Stands for the module `pickle`; remembers under which key torch saves each storage."""

    __name__ = "pickle"

    def __init__(self) -> None:
        self.storages: dict[str, torch.UntypedStorage] = {}
        storages = self.storages

        class Pickler(pickle.Pickler):
            def __init_subclass__(cls) -> None:  # torch makes a subclass, whose persistent_id names the storages
                named = cls.persistent_id

                def persistent_id(self: Any, found: Any) -> Any:
                    name = named(self, found)
                    if name is not None:
                        storages[name[2]] = found if isinstance(found, torch.UntypedStorage) else found._untyped_storage
                    return name

                cls.persistent_id = persistent_id  # type: ignore[method-assign]

        self.Pickler = Pickler
