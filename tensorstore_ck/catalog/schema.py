"""The tables. Times are nanoseconds since 1970; the views also have them as dates.

Everything follows from the stores' logs, except `stores`: how far each log was read, and when.
"""

from typing import Any, Final

from sqlalchemy import BigInteger, Column, Double, Index, Integer, MetaData, Table, Text

VERSION: Final = 5
"""Incremented with each change of the tables; a catalog of another version must be rebuilt."""

PUT_BITS: Final = 13
"""The most puts of an entry: one of 1 MiB has fewer."""
STORE_BITS: Final = 47
"""A snapshot's id is its store's, its entry's number and its position among that entry's puts: the same in every sync."""

metadata: Final = MetaData()


def _text() -> Any:
    """Compared byte by byte, in both databases."""
    return Text().with_variant(Text(collation="C"), "postgresql")


def _key(name: str, kind: Any = BigInteger) -> "Column[Any]":
    return Column(name, kind, primary_key=True, autoincrement=False)


def _numbers(*names: str) -> "list[Column[Any]]":
    return [Column(name, BigInteger, nullable=False) for name in names]


def _texts(*names: str) -> "list[Column[Any]]":
    return [Column(name, _text(), nullable=False) for name in names]


def _of_store(name: str, *columns: "Column[Any] | Index") -> Table:
    return Table(name, metadata, _key("store_id", Integer), *columns)


catalog_version: Final = Table("catalog_version", metadata, _key("version", Integer))

stores: Final = Table(
    "stores",
    metadata,
    Column("store_id", Integer, primary_key=True, autoincrement=True),
    Column("uuid", _text(), nullable=False, unique=True),
    *_texts("url", "log"),
    *_numbers("head_n"),
    *_texts("head_hash"),
    *_numbers("synced_ns"),
)

jobs: Final = _of_store(
    "jobs",
    _key("ref", _text()),
    *_texts("job"),
    *_numbers("puts", "processes"),
    Column("first_step", BigInteger),
    Column("last_step", BigInteger),
    *_numbers("first_time_ns", "last_time_ns", "logical_bytes", "new_bytes"),
)
"""The snapshots of each branch. `logical_bytes` is that of the newest snapshot; `new_bytes` is the sum over all."""

snapshots: Final = Table(
    "snapshots",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("store_id", Integer, nullable=False),
    *_texts("ulid", "root"),
    Column("parent", _text()),
    *_texts("ref", "job"),
    Column("step", BigInteger),
    *_numbers("n", "time_ns"),
    *_texts("actor"),
    *_numbers("logical_bytes", "new_bytes"),
    *_texts("mark", "reason", "state"),
    Column("freed_n", BigInteger),
    Column("duration_ns", BigInteger),
    Index("snapshots_ulid", "store_id", "ulid", unique=True),
    Index("snapshots_root", "root"),
    Index("snapshots_ref", "ref", "store_id", "id"),
    Index("snapshots_job", "job", "step"),
    Index("snapshots_mark", "mark"),
    Index("snapshots_time", "time_ns"),
)
"""All snapshots that were ever saved. `state`: live, forgotten (only undo windows hold it) or gone; `freed_n`: the entry that freed its
record. `duration_ns`: how long the save took, if its entry says so."""

metrics: Final = Table(
    "metrics",
    metadata,
    _key("snapshot"),
    _key("name", _text()),
    Column("value", Double),
    Column("noted", Integer, nullable=False),
    Index("metrics_value", "name", "value", "snapshot"),
    sqlite_with_rowid=False,
)
"""`snapshot`: its id. `value`: NULL for NaN, which SQLite cannot hold. `noted`: 1 if it was added after the save."""

attributes: Final = Table(
    "attributes",
    metadata,
    _key("snapshot"),
    _key("name", _text()),
    Column("value", Double),
    Column("text", _text()),
    Index("attributes_value", "name", "value", "snapshot"),
    Index("attributes_text", "name", "text", "snapshot"),
    sqlite_with_rowid=False,
)
"""`snapshot`: its id. `value`: NULL for NaN and for texts. With the epoch, the triggers and the duration of the save: `searchable`."""

refs: Final = _of_store(
    "refs",
    _key("name", _text()),
    *_texts("ulid", "root"),
    Column("step", BigInteger),
    *_numbers("n", "time_ns", "moves"),
)

tags: Final = _of_store(
    "tags",
    _key("name", _text()),
    *_texts("ulid", "root"),
    *_numbers("n", "time_ns"),
    Index("tags_ulid", "store_id", "ulid"),
)

pins: Final = _of_store(
    "pins",
    _key("ulid", _text()),
    _key("owner", _text()),
    *_texts("reason"),
    Column("expires_ns", BigInteger),
    *_numbers("n", "time_ns"),
)

policies: Final = _of_store(
    "policies",
    _key("glob", _text()),
    *_texts("rules"),
    *_numbers("n", "time_ns"),
)
"""`rules`: as JSON."""

quotas: Final = _of_store(
    "quotas",
    _key("glob", _text()),
    Column("warn_bytes", BigInteger),
    Column("refuse_bytes", BigInteger),
    *_numbers("used_bytes", "n", "time_ns"),
)

events: Final = _of_store(
    "events",
    _key("n"),
    _key("position", Integer),
    *_numbers("time_ns"),
    *_texts("actor", "op"),
    Column("ref", _text()),
    Column("root", _text()),
    Column("ulid", _text()),
    *_texts("detail"),
    Index("events_time", "time_ns"),
    Index("events_store", "store_id", "time_ns"),
    Index("events_ref", "ref", "time_ns"),
    Index("events_op", "op", "time_ns"),
)
"""Every operation in the log; `detail` is JSON with counts instead of lists."""

gc_runs: Final = _of_store(
    "gc_runs",
    _key("n"),
    *_numbers("time_ns"),
    *_texts("actor"),
    *_numbers(*(f"{what}_{kind}" for what in ("condemned", "swept", "rescued") for kind in ("packs", "parts", "snapshots", "moved"))),
    *_numbers("relocated_packs", "purged_windows"),
    Column("settled_n", BigInteger),
)
"""The log entries of gc."""

reports: Final = _of_store(
    "reports",
    _key("n"),
    _key("position", Integer),
    *_numbers("time_ns"),
    *_texts("actor", "run", "outcome"),
    *_numbers("duration_ns"),
    *_texts("counts", "message"),
    Index("reports_run", "store_id", "run", "n"),
)
"""The outcome of each run of gc and fsck. `counts`: as JSON."""

OF_STORES: Final = (jobs, snapshots, refs, tags, pins, policies, quotas, events, gc_runs, reports)
"""Every table with a `store_id`."""


def snapshot_id(store_id: int, n: int, position: int) -> int:
    """The id of a snapshot that entry `n` put."""
    return store_id << STORE_BITS | n << PUT_BITS | position
