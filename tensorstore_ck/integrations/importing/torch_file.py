"""Files of torch.save: today's zip archives, whose directory is read strictly, and the sequence of pickles from before torch 1.6.

Never uses `torch.load`: `safe_unpickle` reads the pickle with the names of a `PickleAllowlist`, so nothing in it is run, and every tensor
stays in the mapped file. Also reads a file inside another one, as in the files of torch.distributed.checkpoint.

torch stores every record uncompressed, so that it can be mapped. Anything that torch does not write (compressed, encrypted, overlapping or
duplicate records, trailing data) is rejected, so no archive can claim more bytes than it has.
"""

import struct
import zlib
from itertools import pairwise
from typing import Any, Final, NamedTuple, NoReturn

import torch

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file, printable
from tensorstore_ck.integrations.importing.mapped_files import Files, MappedFile
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist, StorageType, Stored
from tensorstore_ck.integrations.importing.placeholders import UnknownObject
from tensorstore_ck.integrations.importing.safe_unpickler import MAX_PICKLE_BYTES, safe_unpickle

MAX_RECORDS: Final = 4_000_000
MAX_NAME_BYTES: Final = 1024

_END: Final = struct.Struct("<4s4H2IH")
_END_64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64: Final = struct.Struct("<4sIQI")
_ENTRY: Final = struct.Struct("<4s6H3I5H2I")
_LOCAL: Final = struct.Struct("<4s5H3I2H")
_ENCRYPTED: Final = 0x41
"""Flags of a record that is encrypted."""
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF


class ZipRecord(NamedTuple):
    """One record of an archive."""

    start: int
    """Its position in the archive."""
    size: int
    checksum: int
    """CRC-32 of the bytes; 0: unknown."""
    is_plain: bool
    """Whether the bytes are neither compressed nor encrypted."""


def is_archive(data: memoryview) -> bool:
    """Whether the bytes begin like a zip archive."""
    return bytes(data[:4]) == b"PK\x03\x04"


def read_archive(data: memoryview) -> dict[str, ZipRecord]:
    """Name -> record, of the archive `data`. Raises `MalformedError` if it is damaged, or torch did not write it."""
    try:
        return _records(data)
    except (struct.error, UnicodeDecodeError) as exc:
        raise MalformedError("its zip directory is cut off or damaged") from exc


def _records(data: memoryview) -> dict[str, ZipRecord]:
    count, start, stop = _directory(data)
    records: dict[str, ZipRecord] = {}
    spans = []
    at = start
    for _ in range(count):
        magic, _, _, flags, method, _, _, checksum, stored, size, name_size, extra_size, comment_size, _, _, _, local = _ENTRY.unpack_from(
            data, at
        )
        if magic != b"PK\x01\x02" or at + _ENTRY.size + name_size + extra_size + comment_size > stop:
            raise MalformedError("its zip directory is damaged")
        at += _ENTRY.size
        name = str(data[at : at + min(name_size, MAX_NAME_BYTES)], "utf-8")
        extra = data[at + name_size : at + name_size + extra_size]
        at += name_size + extra_size + comment_size
        size, stored, local = _wide(extra, [size, stored, local])
        is_plain = not method and not flags & _ENCRYPTED
        if is_plain and size != stored:
            raise MalformedError(f"its record {printable(name)!r} has two sizes")
        if name in records:
            raise MalformedError(f"it has the record {printable(name)!r} twice")
        begin = _local_end(data, local=local, name_size=name_size, directory=start, form=(flags & _ENCRYPTED, method))
        if stored > start - begin:
            raise MalformedError(f"its record {printable(name)!r} claims {stored} bytes, where {start - begin} are left")
        records[name] = ZipRecord(begin, stored, checksum, is_plain)
        spans.append((local, begin + stored))
    if at != stop:
        raise MalformedError("its zip directory does not end where it should")
    spans.sort()
    if any(here[1] > there[0] for here, there in pairwise(spans)):
        raise MalformedError("its records overlap")
    return records


def _directory(data: memoryview) -> tuple[int, int, int]:
    """The number of records, and the start and end of the directory."""
    end = len(data) - _END.size
    if end < 0:
        raise MalformedError("it is too short for a zip archive, or cut off")
    magic, disk, first_disk, here, count, size, start, comment_size = _END.unpack_from(data, end)
    if magic != b"PK\x05\x06" or comment_size:
        raise MalformedError("it does not end as a zip archive that torch wrote: it is cut off, or something follows it")
    stop = end
    if end >= _LOCATOR_64.size and bytes(data[end - _LOCATOR_64.size : end][:4]) == b"PK\x06\x07":
        _, disk, at, _ = _LOCATOR_64.unpack_from(data, end - _LOCATOR_64.size)
        if at > end - _LOCATOR_64.size - _END_64.size:
            raise MalformedError("its zip directory is damaged")
        magic, _, _, _, disk, first_disk, here, count, size, start = _END_64.unpack_from(data, at)
        stop = at
        if magic != b"PK\x06\x06":
            raise MalformedError("its zip directory is damaged")
    if disk or first_disk or here != count or start + size != stop or count > min(MAX_RECORDS, size // _ENTRY.size):
        raise MalformedError("its zip directory does not fit the file: it is damaged, or something was added before or after it")
    return count, start, stop


def _wide(extra: memoryview, numbers: list[int]) -> list[int]:
    """The numbers of an entry, with those over 32 bits from its extra field."""
    if _FULL_32 not in numbers:
        return numbers
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        at += 4
        if kind == 1:
            for position, number in enumerate(numbers):
                if number == _FULL_32:
                    (numbers[position],) = struct.unpack_from("<Q", extra, at)
                    at += 8
            return numbers
        at += size
    raise MalformedError("its zip directory lacks the size of a large record")


def _local_end(data: memoryview, local: int, name_size: int, directory: int, form: tuple[int, int]) -> int:
    """The start of the bytes of the record whose header is at `local`."""
    if local > directory - _LOCAL.size:
        raise MalformedError("its zip directory points beyond the records")
    magic, _, flags, method, _, _, _, _, _, own_name_size, extra_size = _LOCAL.unpack_from(data, local)
    begin: int = local + _LOCAL.size + own_name_size + extra_size
    if magic != b"PK\x03\x04" or own_name_size != name_size or (flags & _ENCRYPTED, method) != form or begin > directory:
        raise MalformedError("its zip directory points to something that is no record")
    return begin


KIND: Final = "torch file"
_MAGIC: Final = 0x1950A86A20F9469CFC6C
_MAGIC_PICKLED: Final = b"\x8a\x0a" + _MAGIC.to_bytes(10, "little") + b"."
_FIRST_BYTES: Final = 1024
_PROTOCOL: Final = 1001
_PROGRAMS: Final = {"constants.pkl": ("TorchScript", "torch.jit.load"), "archive_format": ("torch.export", "torch.export.load")}
"""Record in the archive of a program -> its kind, and what loads it."""


class LoadedTorchFile(NamedTuple):
    """The object in a torch file."""

    value: Any
    """May hold placeholders, for `resolve_placeholders`."""
    unknown: set[str]
    """Names that are not allowed: each must occur as an `UnknownObject` in the value, or the pickle used it and hid that."""


def is_torch_file(file: MappedFile) -> bool:
    """Whether it begins like a torch file, or is an archive of torch in another order."""
    first = bytes(file.data[:_FIRST_BYTES])
    if not is_archive(file.data):
        return first[:1] == b"\x80" and first[2:15] == _MAGIC_PICKLED
    if first[30 : 30 + int.from_bytes(first[26:28], "little")].endswith(b"/data.pkl"):
        return True
    try:
        return any(name.partition("/")[2] in ("data.pkl", *_PROGRAMS) for name in read_archive(file.data))
    except MalformedError:
        return False


def load_torch_file(files: Files, file: MappedFile, known: PickleAllowlist, start: int = 0, size: int | None = None) -> LoadedTorchFile:
    """The object in the torch file at bytes [start, start + size) of `file`.

    Raises `CorruptObjectError` if it is damaged or inconsistent, `UnsupportedValueError` if its kind is not supported.
    """
    stop = file.size if size is None else start + size
    with naming_file(file.path, KIND):
        data = file.data[start:stop]
        if is_archive(data):
            return _from_archive(files, file=file, known=known, start=start, data=data)
        return _from_pickles(file, known, start, data)


def _from_archive(files: Files, file: MappedFile, known: PickleAllowlist, start: int, data: memoryview) -> LoadedTorchFile:
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
    return LoadedTorchFile(value, unknown)


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


def _from_pickles(file: MappedFile, known: PickleAllowlist, start: int, data: memoryview) -> LoadedTorchFile:
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

    body = data[at:]
    _, end, _ = safe_unpickle(body, _StorageTypes(known), note)
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
    return LoadedTorchFile(value, unknown)


class _StorageTypes:
    """A `FindGlobal` that knows only the classes of storages."""

    def __init__(self, known: PickleAllowlist) -> None:
        self._known = known

    def __call__(self, module: str, name: str) -> object:
        kind = self._known(module, name)
        if not isinstance(kind, StorageType):
            raise LookupError(name)
        return kind


def _nothing(module: str, name: str) -> NoReturn:
    raise LookupError(name)


def _unsupported(path: str, what: str, advice: str) -> NoReturn:
    raise UnsupportedValueError(f"{path} {what}, which is not imported: {advice}", object_id=path)
