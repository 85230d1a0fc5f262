"""Writer records: which process has written the packs, parts and records whose names are of one series. Pure: bytes in, bytes out.

gc uses them to free what a process that is proven to have ended left behind, without waiting. Nothing else reads them, and nothing
is lost with them. Format: FORMAT.md, "Writer records".
"""

from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Ulid, ulid_text
from tensorstore_ck.common.processes import Process
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.sealed import seal, take, take_count, unseal

WRITERS: Final = "writers/"
MAX_RECORD_BYTES: Final = 64 << 10
SERIES_START: Final = 6
"""After the milliseconds of a ULID."""
SERIES_BYTES: Final = 5
SERIES_SECONDS: Final = 12 * 3600.0
"""No name of a series is drawn later than that after the first: so a record that is much older is of no use any more."""

Series = bytes
"""What the ULIDs that one process draws for its puts have in common: the first 40 of their 80 random bits."""


class WriterRecord(NamedTuple):
    """One decoded writer record."""

    series: Series
    process: Process
    time_ns: int

    @property
    def name(self) -> str:
        """Where it lies in the store."""
        return writer_record_name(self.series)

    def encode(self) -> bytes:
        """The sealed object."""
        return seal("writer", {"series": self.series, **self.process._asdict(), "time_ns": self.time_ns})


def series_of(ulid: Ulid) -> Series:
    """The series that a ULID belongs to, if there is a record of it."""
    return ulid[SERIES_START : SERIES_START + SERIES_BYTES]


def in_series(ulid: Ulid, series: Series) -> Ulid:
    """`ulid` as one of a series."""
    return Ulid(ulid[:SERIES_START] + series + ulid[SERIES_START + SERIES_BYTES :])


def writer_record_name(series: Series) -> str:
    """Where the record of a series lies: the 8 characters that its ULIDs have in common."""
    return WRITERS + ulid_text(in_series(Ulid(bytes(16)), series))[10:18]


def decode_writer_record(data: bytes, name: str) -> WriterRecord:
    """Decodes and checks a sealed writer record.

    Raises:
        CorruptObjectError: not one, or not that of this name.
    """
    body = unseal("writer", data, name)
    try:
        process = Process(
            take(body, "host", str),
            take(body, "boot_id", str),
            take(body, "pid_namespace", str),
            take_count(body, "pid"),
            take_count(body, "start_ticks"),
        )
        record = WriterRecord(take(body, "series", bytes), process, take_count(body, "time_ns"))
        is_named_so = len(record.series) == SERIES_BYTES and record.name == name
    except (TypeError, ValueError) as exc:
        raise CorruptObjectError(f"{name} is not a valid writer record: {exc}", object_id=name) from exc
    if not is_named_so:
        raise CorruptObjectError(f"{name} is the writer record of another series", object_id=name)
    return record
