"""A snapshot as a file of `torch.save`: types, values, shared memory and gradient flags as `Store.checkout` returns them.

Torch itself pickles the state and lays out the file (`torch.serialization.skip_data`), so the file equals that of `torch.save`. The CRC-32s
are known only after the bytes: `TorchZipTemplate.sealed` then adds them. Knows no store.
"""

import os
import pickle
import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Self

import torch

from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.format.tree import leaves
from tensorstore_ck.integrations.exporting.atomic_target import require_disk_space
from tensorstore_ck.integrations.exporting.blocks_to_files import ByteRouter
from tensorstore_ck.integrations.exporting.job import ExportJob, WrittenExport
from tensorstore_ck.integrations.exporting.meta_state import MetaState
from tensorstore_ck.integrations.exporting.output_file import OutputFile
from tensorstore_ck.state import capture
from tensorstore_ck.state.select import listed

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


SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")
NAME: Final = "model.pt"


def write_torch(job: ExportJob) -> WrittenExport:
    """Writes the file into the job's folder.

    Raises:
        UnsupportedValueError: torch cannot save the state.
        DamageError: stored data is damaged, or the file does not hold what was written to it.
    """
    content, tree, folder, target = job.content, job.tree, job.folder, job.target
    meta = MetaState(content, tree, by_value=frozenset("r"))  # a registered type may read its tensors
    meta.require_one_dtype()
    require_savable(((tensor, leaf.path) for tensor, leaf in meta.tensors.values()), target.path)
    template = build_template(meta.state, target.path)
    require_disk_space(folder, template.size_bytes, target.path)
    path = os.path.join(folder, os.path.basename(target.path) if target.is_file else NAME)
    with TorchOutput(path, target.path, template) as output:
        router = ByteRouter(content)
        output.route(router, content, meta)
        router.run(os.path.join(folder, "scratch"))
        output.finish()
    notes = _reopened(path, meta.state, target.path)
    kept = [leaf for leaf in leaves(tree) if leaf.kind != "value"]
    return WrittenExport(len(kept), sum(len(gap.region) for gap in template.gaps), {}, notes)


class TorchOutput:
    """One file of `torch.save` whose tensors a `ByteRouter` writes. A context manager."""

    def __init__(self, path: str, shown: str, template: TorchZipTemplate) -> None:
        """`shown`: its name in messages, since `path` is temporary."""
        self._file, self._template = OutputFile(path, shown, is_summed=True), template

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__()

    def route(self, router: ByteRouter, content: SnapshotContent, meta: MetaState) -> None:
        """Adds the stored tensors to the router, and writes the others."""
        file = self._file
        for gap in self._template.gaps:
            stored = meta.stored_in(gap.storage)
            if not stored:  # it has its bytes
                file.write(gap.offset, torch.tensor([], dtype=torch.uint8).set_(gap.storage).numpy().data)
                continue
            end = 0
            for number, offset in [*stored, (None, gap.storage.nbytes())]:
                file.write(gap.offset + end, bytes(offset - end))  # unused bytes between tensors of one storage
                if number is not None:
                    router.add(number, file, gap.offset + offset)
                    end = offset + content.layout.tensors[number].size_bytes

    def finish(self) -> None:
        """Reads the tensors back, adds their checksums, and makes the file durable.

        Raises:
            CorruptObjectError: the file does not hold what was written to it.
        """
        regions = [gap.region for gap in self._template.gaps]
        for offset, data in self._template.sealed(self._file.read_back(regions)):
            self._file.write(offset, data)
        self._file.finish(self._template.size_bytes, regions)


def _reopened(path: str, state: object, shown: str) -> list[str]:
    """Opens the file as its readers will, and compares all but tensor bytes with the state; returns notes for readers."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if unsafe:
            return [
                f"torch.load needs weights_only=False, or torch.serialization.add_safe_globals, for {listed(sorted(unsafe))}: "
                "the snapshot has types that torch does not load otherwise"
            ]
        reread = _form(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except (RuntimeError, pickle.UnpicklingError) as exc:
        raise CorruptObjectError(f"torch cannot read {shown} back ({exc}): the export was aborted", object_id=shown) from exc
    if reread != _form(state):
        raise CorruptObjectError(
            f"torch reads something else from {shown} than the snapshot holds: the export was aborted", object_id=shown
        )
    return []


def _form(state: object) -> tuple[bytes, bytes, list[bytes]]:
    """Everything in a state except tensor bytes: types, names, shapes, shared memory, values."""
    taken = capture(state)
    return taken.layout.encode(), pack_body(list(taken.values)), list(taken.blobs)
