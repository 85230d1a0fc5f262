"""The directory of a zip archive, read strictly: the position of each record. Pure.

torch stores every record uncompressed, so that it can be mapped. Anything that torch does not write (compressed, encrypted, overlapping or
duplicate records, trailing data) is rejected, so no archive can claim more bytes than it has.
"""

import struct
from itertools import pairwise
from typing import Final, NamedTuple

from tensorstore_ck.integrations.importing.malformed import MalformedError, printable

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
