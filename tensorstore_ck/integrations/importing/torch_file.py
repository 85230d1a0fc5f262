"""Files of torch.save: today's zip archives, and the sequence of pickles from before torch 1.6.

Never uses `torch.load`: `safe_unpickle` reads the pickle with the names of a `PickleAllowlist`, so nothing in it is run, and every tensor
stays in the mapped file. Also reads a file inside another one, as in the files of torch.distributed.checkpoint.
"""

import struct
import zlib
from typing import Any, Final, NoReturn

import torch

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file, printable
from tensorstore_ck.integrations.importing.mapped_files import Files, MappedFile
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist, StorageType, Stored
from tensorstore_ck.integrations.importing.placeholders import UnknownObject
from tensorstore_ck.integrations.importing.safe_unpickler import MAX_PICKLE_BYTES, safe_unpickle
from tensorstore_ck.integrations.importing.zip_directory import is_archive, read_archive

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_MAGIC_PICKLED: Final = b"\x8a\x0a" + _MAGIC.to_bytes(10, "little") + b"."
_FRAME: Final = b"\x95" + len(_MAGIC_PICKLED).to_bytes(8, "little")
"""Before it with protocols from 4 on."""
_FIRST_BYTES: Final = 1024
_PROTOCOL: Final = 1001
_PROGRAMS: Final = {"constants.pkl": ("TorchScript", "torch.jit.load"), "archive_format": ("torch.export", "torch.export.load")}
"""Record in the archive of a program -> its kind, and what loads it."""


def is_torch_file(file: MappedFile) -> bool:
    """Whether it begins like a torch file, or is an archive of torch in another order."""
    first = bytes(file.data[:_FIRST_BYTES])
    if not is_archive(file.data):
        return first[:1] == b"\x80" and first[2:].removeprefix(_FRAME).startswith(_MAGIC_PICKLED)
    if first[30 : 30 + int.from_bytes(first[26:28], "little")].endswith(b"/data.pkl"):
        return True
    try:
        return any(name.partition("/")[2] in ("data.pkl", *_PROGRAMS) for name in read_archive(file.data))
    except MalformedError:
        return False


def load_torch_file(
    files: Files, file: MappedFile, known: PickleAllowlist, start: int = 0, size: int | None = None
) -> tuple[Any, dict[str, str]]:
    """The object in the torch file at bytes [start, start + size) of `file`, with placeholders for `resolve_placeholders`.

    Also returns the names that are not allowed, each with the path of `file`: each must occur as an `UnknownObject` in the object, or the
    pickle used it and hid that.

    Raises `CorruptObjectError` if it is damaged or inconsistent, `UnsupportedValueError` if its kind is not supported.
    """
    stop = file.size if size is None else start + size
    with naming_file(file.path, "torch file"):
        data = file.data[start:stop]
        if is_archive(data):
            return _from_archive(files, file=file, known=known, start=start, data=data)
        return _from_pickles(file, known, start, data)


# --- archives -------------------------------------------------------------------------------------------------------


def _from_archive(files: Files, file: MappedFile, known: PickleAllowlist, start: int, data: memoryview) -> tuple[Any, dict[str, str]]:
    records = read_archive(data)
    (folder, *more) = {name.partition("/")[0] for name in records} or {""}
    for name, (kind, loader) in _PROGRAMS.items():
        if f"{folder}/{name}" in records and not more:
            _unsupported(file.path, f"is a program of {kind}", f"save the state_dict() of what {loader} returns, where you trust it")
    pickle = records.get(f"{folder}/data.pkl")
    if more or pickle is None:
        raise MalformedError("it is a zip archive, but not one that torch.save wrote")
    if not all(record.is_plain for record in records.values()):
        _unsupported(file.path, "was compressed or encrypted after torch.save wrote it", "load it with torch, and save it again")
    order = records.get(f"{folder}/byteorder")
    if order is not None and bytes(data[order.start : order.start + order.size]) != b"little":
        _unsupported(file.path, "was saved on a big-endian machine", "load it with torch, and save it again on this machine")
    if pickle.size > MAX_PICKLE_BYTES:
        raise MalformedError(f"its pickle takes {pickle.size} bytes")
    storages: dict[str, Stored] = {}

    def storage(pid: Any) -> Stored:
        dtype, key, count = _checked(pid)
        if key not in storages:
            record = records.get(f"{folder}/data/{key}")
            if record is None or record.size != count * dtype.itemsize:
                held = "is not in the archive" if record is None else f"has {record.size} bytes"
                raise MalformedError(f"it claims {count} elements of {dtype} in storage {printable(key, 40)}, which {held}")
            if record.checksum and record.size:  # torch.serialization.set_crc32_options(False) omits it
                files.expect(file, start + record.start, record.size, record.checksum)
            storages[key] = Stored(file.storage(start + record.start, record.size), dtype)
        elif storages[key].dtype != dtype:
            return Stored(storages[key].storage, dtype)
        return storages[key]

    code = data[pickle.start : pickle.start + pickle.size]
    if pickle.checksum not in (0, zlib.crc32(code)):
        raise MalformedError("its pickle does not match its checksum")
    known.parsed_bytes += pickle.size
    value, end, unknown = safe_unpickle(code, known, storage)
    if end != pickle.size:
        raise MalformedError("something follows its pickle")
    return value, dict.fromkeys(unknown, file.path)


def _checked(pid: Any) -> tuple[torch.dtype, str, int]:
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
        raise MalformedError("it references something outside that is no storage")
    kind, key, _, count = pid[1:5]
    if isinstance(kind, UnknownObject):
        raise MalformedError(f"it has a storage of the unknown kind {kind.name}")
    if not isinstance(kind, StorageType) or type(key) is not str or type(count) is not int or count < 0:
        raise MalformedError("it references a malformed storage")
    return kind.dtype, key, count


def _module_class(pid: Any) -> UnknownObject | None:
    """The class of a module, which is saved with its source; None for another persistent id."""
    is_module = type(pid) is tuple and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], UnknownObject)
    return pid[1] if is_module else None


# --- before torch 1.6 -----------------------------------------------------------------------------------------------


def _from_pickles(file: MappedFile, known: PickleAllowlist, start: int, data: memoryview) -> tuple[Any, dict[str, str]]:
    """Magic, protocol, system, the object, the keys of its storages; then each storage, after its number of elements."""
    at = 0

    def next_plain() -> Any:
        nonlocal at
        value, end, _ = safe_unpickle(data[at:], _nothing)
        at += end
        return value

    if next_plain() != _MAGIC:
        raise MalformedError("it is a pickle, but not of torch.save")
    if next_plain() != _PROTOCOL:
        raise MalformedError("it is of an unknown protocol")
    system = next_plain()
    if type(system) is not dict or system.get("little_endian") is not True:
        _unsupported(file.path, "was saved on a big-endian machine", "load it with torch, and save it again on this machine")
    # The storages come after the object, so it is read twice: first to find its end and its storages.
    kinds: dict[str, torch.dtype] = {}

    def note(pid: Any) -> object:
        if (module := _module_class(pid)) is not None:
            return module
        dtype, key, _ = _checked(pid)
        kinds.setdefault(key, dtype)
        return UnknownObject("a storage")

    def find_type(module: str, name: str) -> StorageType:
        kind = known(module, name)
        if not isinstance(kind, StorageType):
            raise LookupError(name)
        return kind

    body = data[at:]
    _, end, _ = safe_unpickle(body, find_type, note)
    at += end
    known.parsed_bytes += end
    keys = next_plain()
    if type(keys) is not list or any(type(key) is not str for key in keys) or len(keys) != len(kinds) or set(keys) != set(kinds):
        raise MalformedError("its list of storages does not match its object")
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        if at + 8 > len(data):
            raise MalformedError("it is cut off")
        (count,) = struct.unpack_from("<q", data, at)
        size = count * kinds[key].itemsize
        at += 8
        if count < 0 or size > len(data) - at:
            raise MalformedError(f"it claims a storage of {size} bytes at byte {at}, where {len(data) - at} are left")
        places[key] = at, size
        at += size
    if at != len(data):
        raise MalformedError("something follows its storages")
    storages: dict[str, torch.UntypedStorage] = {}

    def storage(pid: Any) -> object:
        if (module := _module_class(pid)) is not None:
            return module
        dtype, key, count = _checked(pid)
        begin, size = places[key]
        if len(pid) == 6 and pid[5] is not None:
            _unsupported(file.path, "was saved by torch 0.3 or older", "load it with torch, and save it again")
        if count * dtype.itemsize != size:
            raise MalformedError(f"it claims {count} elements of {dtype} in storage {printable(key, 40)}, which has {size} bytes")
        if key not in storages:
            storages[key] = file.storage(start + begin, size)
            if (start + begin) % dtype.itemsize:  # the format has no alignment, but tensors need it
                storages[key] = torch.empty(0, dtype=torch.uint8).set_(storages[key]).clone().untyped_storage()
        return Stored(storages[key], dtype)

    value, _, unknown = safe_unpickle(body, known, storage)
    return value, dict.fromkeys(unknown, file.path)


def _nothing(module: str, name: str) -> NoReturn:
    raise LookupError(name)


def _unsupported(path: str, what: str, advice: str) -> NoReturn:
    raise UnsupportedValueError(f"{path} {what}, which is not imported: {advice}", object_id=path)
