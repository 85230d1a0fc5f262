"""Torch's zip files with gaps for the tensors' bytes, which are filled in later.

Torch itself pickles the state and lays out the file (`torch.serialization.skip_data`), so the file equals that of `torch.save`. The CRC-32s
are known only after the bytes: `TorchZipTemplate.sealed` then adds them. Knows no store.
"""

import os
import pickle
import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch

from tensorstore_ck.common.units import listed
from tensorstore_ck.errors import UnsupportedValueError

_DESCRIPTOR: Final = b"PK\x07\x08"
_ENTRY: Final = b"PK\x01\x02"


class StorageGap(NamedTuple):
    """The place for the bytes of one storage."""

    offset: int
    storage: torch.UntypedStorage
    key: str

    @property
    def region(self) -> range:
        """Its bytes in the file."""
        return range(self.offset, self.offset + self.storage.nbytes())


class TorchZipTemplate(NamedTuple):
    """A torch file without the bytes of its tensors."""

    pieces: list[tuple[int, bytearray]]
    """(offset, bytes) of everything between the gaps."""
    gaps: list[StorageGap]
    size_bytes: int

    def sealed(self, checksums: list[int]) -> list[tuple[int, bytearray]]:
        """The pieces, with the CRC-32s of the gaps filled in."""
        of_key = {gap.key: checksum for gap, checksum in zip(self.gaps, checksums, strict=True)}
        pieces = [(offset, bytearray(data)) for offset, data in self.pieces]
        after = dict(pieces)
        for gap, checksum in zip(self.gaps, checksums, strict=True):
            data = after[gap.region.stop]
            if data[:4] != _DESCRIPTOR:
                raise _unknown_file_layout("no checksum follows a tensor")
            struct.pack_into("<I", data, 4, checksum)
        offset, tail = pieces[-1]
        at = _directory_offset(offset, tail) - offset
        sealed = 0
        while tail[at : at + 4] == _ENTRY:
            name_length, *others = struct.unpack_from("<3H", tail, at + 28)
            folder, _, key = tail[at + 46 : at + 46 + name_length].decode().rpartition("/")
            if folder.endswith("/data") and key in of_key:
                struct.pack_into("<I", tail, at + 16, of_key[key])
                sealed += 1
            at += 46 + name_length + sum(others)
        if sealed != len(self.gaps):
            raise _unknown_file_layout(f"its directory has {sealed} of {len(self.gaps)} tensors")
        return pieces


def build_template(state: object, path: str) -> TorchZipTemplate:
    """The file of `torch.save` for a state, with gaps for the bytes of its storages.

    Raises:
        UnsupportedValueError: torch cannot save it; the message calls it `path`.
    """
    file, pickling = _Recorder(), _Pickling()
    try:
        with torch.serialization.skip_data():
            torch.save(state, file, pickle_module=pickling)  # type: ignore[arg-type]
    except (RuntimeError, pickle.PicklingError, TypeError, KeyError, AttributeError) as exc:
        raise UnsupportedValueError(f"torch cannot save {path}: {exc}; exclude that with --exclude (exclude=)", object_id=path) from exc
    filled = [(key, storage) for key, storage in pickling.storages.items() if storage.nbytes()]
    if [storage.nbytes() for _, storage in filled] != [size for _, size in file.gaps]:
        raise _unknown_file_layout("it has different tensors")
    gaps = [StorageGap(offset, storage, key) for (offset, _), (key, storage) in zip(file.gaps, filled, strict=True)]
    return TorchZipTemplate(file.pieces, gaps, file.position)


def require_savable(tensors: Iterable[tuple[torch.Tensor, str]], shown: str) -> None:
    """Rejects tensors whose dtype `torch.save` does not support: raises `UnsupportedValueError`, which names them."""
    known: dict[torch.dtype, bool] = {}
    unknown = []
    for tensor, name in tensors:
        if tensor.dtype not in known:
            try:
                build_template(tensor.detach(), shown)
                known[tensor.dtype] = True
            except UnsupportedValueError:
                known[tensor.dtype] = False
        if not known[tensor.dtype]:
            unknown.append(f"{name} ({tensor.dtype})")
    if unknown:
        raise UnsupportedValueError(
            f"torch.save does not support the dtype of {listed(unknown)}: exclude what you do not need with --exclude NAME (exclude=)",
            object_id=unknown[0].partition(" ")[0],
        )


def _unknown_file_layout(what: str) -> UnsupportedValueError:
    return UnsupportedValueError(f"torch {torch.__version__} has an unknown file layout ({what}): export with torch 2.13")


def _directory_offset(start: int, tail: bytearray) -> int:
    """The offset of the zip's directory; `tail` is the end of the file, from `start` on."""
    end = len(tail) - 22
    (offset,) = struct.unpack_from("<I", tail, end + 16)
    if offset != 0xFFFFFFFF:
        return int(offset)
    (record,) = struct.unpack_from("<Q", tail, end - 20 + 8)
    return int(struct.unpack_from("<Q", tail, record - start + 48)[0])


class _Recorder:
    """A file that records what torch writes, and the gaps over which it seeks."""

    def __init__(self) -> None:
        self.position = 0
        self.pieces: list[tuple[int, bytearray]] = [(0, bytearray())]
        self.gaps: list[tuple[int, int]] = []

    def write(self, data: Any) -> int:
        self.pieces[-1][1].extend(data)
        self.position += len(data)
        return len(data)

    def seek(self, count: int, whence: int) -> int:
        assert whence == os.SEEK_CUR, "torch seeks forward over what it skips"
        self.gaps.append((self.position, count))
        self.position += count
        self.pieces.append((self.position, bytearray()))
        return self.position

    def flush(self) -> None:
        pass


class _Pickling:
    """Replaces the module `pickle`; records the key under which torch saves each storage."""

    __name__ = "pickle"

    def __init__(self) -> None:
        self.storages: dict[str, torch.UntypedStorage] = {}
        storages = self.storages

        class Pickler(pickle.Pickler):
            def __init_subclass__(cls) -> None:  # torch creates a subclass, whose persistent_id names the storages
                named = cls.persistent_id

                def persistent_id(self: Any, stored: Any) -> Any:
                    name = named(self, stored)
                    if name is not None:
                        storages[name[2]] = stored if isinstance(stored, torch.UntypedStorage) else stored._untyped_storage
                    return name

                cls.persistent_id = persistent_id  # type: ignore[method-assign]

        self.Pickler = Pickler
