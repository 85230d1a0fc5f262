"""Writer records: the process that wrote the packs, parts and records whose names belong to one series. Pure: bytes in, bytes out.

Only gc reads them: it frees the leftovers of an ended process at once. Losing a writer record loses no data. Format: FORMAT.md,
"Writer records".
"""

from typing import Final, NamedTuple

from tensorstore_ck.common.ids import SERIES_BYTES, Series, Ulid, in_series, ulid_text
from tensorstore_ck.common.processes import Process
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.sealed import seal, take, take_count, unseal

WRITERS: Final = "writers/"
MAX_RECORD_BYTES: Final = 64 << 10
SERIES_SECONDS: Final = 12 * 3600.0
"""The names of a series are all drawn within this time, so much older records are useless."""


class WriterRecord(NamedTuple):
    """One decoded writer record."""

    series: Series
    process: Process
    time_ns: int

    @property
    def name(self) -> str:
        """The record's name in the store."""
        return writer_record_name(self.series)

    def encode(self) -> bytes:
        """The sealed object."""
        return seal("writer", {"series": self.series, **self.process._asdict(), "time_ns": self.time_ns})


def writer_record_name(series: Series) -> str:
    """The name of a series' record: ``writers/`` and the 8 characters that its ULIDs share."""
    return WRITERS + ulid_text(in_series(Ulid(bytes(16)), series))[10:18]


def decode_writer_record(data: bytes, name: str) -> WriterRecord:
    """Decodes and checks a sealed writer record.

    Raises:
        CorruptObjectError: not a writer record, or the record of another name.
    """
    body = unseal("writer", data, name)
    try:
        process = Process(
            host=take(body, "host", str),
            boot_id=take(body, "boot_id", str),
            pid_namespace=take(body, "pid_namespace", str),
            pid=take_count(body, "pid"),
            start_ticks=take_count(body, "start_ticks"),
        )
        record = WriterRecord(take(body, "series", bytes), process, take_count(body, "time_ns"))
        is_named_so = len(record.series) == SERIES_BYTES and record.name == name
    except (TypeError, ValueError) as exc:
        raise CorruptObjectError(f"{name} is not a valid writer record: {exc}", object_id=name) from exc
    if not is_named_so:
        raise CorruptObjectError(f"{name} is the writer record of another series", object_id=name)
    return record
