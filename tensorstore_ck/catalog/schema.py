"""The tables. Times are nanoseconds since 1970; the views have them as dates, too.

What is there follows from the stores' logs alone, but for `stores`, which says how far each was read and when.
"""

from typing import Any, Final

from sqlalchemy import BigInteger, Column, Double, Index, Integer, MetaData, Table, Text

VERSION: Final = 1
"""Raised with each change; a catalog of another version is made anew."""

PUT_BITS: Final = 13
"""An entry, of 1 MiB, has fewer puts."""
STORE_BITS: Final = 47
"""A snapshot's id is its store's, its entry's number and its place among that entry's puts: the same however often it is fed."""

metadata: Final = MetaData()


def _text() -> Any:
    """Compared byte by byte, in both databases."""
    return Text().with_variant(Text(collation="C"), "postgresql")


def _key(name: str, kind: Any = BigInteger) -> "Column[Any]":
    return Column(name, kind, primary_key=True, autoincrement=False)


def _said(name: str, kind: Any = BigInteger) -> "Column[Any]":
    return Column(name, kind, nullable=False)


catalog_version: Final = Table("catalog_version", metadata, _key("version", Integer))

stores: Final = Table(
    "stores",
    metadata,
    Column("store_id", Integer, primary_key=True, autoincrement=True),
    Column("uuid", _text(), nullable=False, unique=True),
    _said("url", _text()),
    _said("log", _text()),
    _said("head_n"),
    _said("head_hash", _text()),
    _said("synced_ns"),
)

jobs: Final = Table(
    "jobs",
    metadata,
    _key("store_id", Integer),
    _key("ref", _text()),
    _said("job", _text()),
    _said("puts"),
    _said("processes"),
    Column("first_step", BigInteger),
    Column("last_step", BigInteger),
    _said("first_time_ns"),
    _said("last_time_ns"),
    _said("logical_bytes"),
    _said("new_bytes"),
)
"""The lines of snapshots that were put to one branch each. `logical_bytes`: of the newest; `new_bytes`: of all together."""

snapshots: Final = Table(
    "snapshots",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    _said("store_id", Integer),
    _said("ulid", _text()),
    _said("root", _text()),
    Column("parent", _text()),
    _said("ref", _text()),
    _said("job", _text()),
    Column("step", BigInteger),
    _said("n"),
    _said("time_ns"),
    _said("actor", _text()),
    _said("logical_bytes"),
    _said("new_bytes"),
    _said("mark", _text()),
    _said("reason", _text()),
    _said("state", _text()),
    Column("freed_n", BigInteger),
    Index("snapshots_ulid", "store_id", "ulid", unique=True),
    Index("snapshots_root", "root"),
    Index("snapshots_ref", "ref", "store_id", "id"),
    Index("snapshots_job", "job", "step"),
    Index("snapshots_mark", "mark"),
    Index("snapshots_time", "time_ns"),
)
"""All that were ever put. `state`: live, forgotten (only undo windows hold it) or gone; `freed_n`: the entry that freed its record."""

metrics: Final = Table(
    "metrics",
    metadata,
    _key("snapshot"),
    _key("name", _text()),
    Column("value", Double),
    _said("noted", Integer),
    Index("metrics_value", "name", "value", "snapshot"),
    sqlite_with_rowid=False,
)
"""`snapshot`: its id. `value`: NULL for NaN, which SQLite cannot hold. `noted`: 1 where it was said after the put."""

refs: Final = Table(
    "refs",
    metadata,
    _key("store_id", Integer),
    _key("name", _text()),
    _said("ulid", _text()),
    _said("root", _text()),
    Column("step", BigInteger),
    _said("n"),
    _said("time_ns"),
    _said("moves"),
)

tags: Final = Table(
    "tags",
    metadata,
    _key("store_id", Integer),
    _key("name", _text()),
    _said("ulid", _text()),
    _said("root", _text()),
    _said("n"),
    _said("time_ns"),
    Index("tags_ulid", "store_id", "ulid"),
)

pins: Final = Table(
    "pins",
    metadata,
    _key("store_id", Integer),
    _key("ulid", _text()),
    _key("owner", _text()),
    _said("reason", _text()),
    Column("expires_ns", BigInteger),
    _said("n"),
    _said("time_ns"),
)

policies: Final = Table(
    "policies",
    metadata,
    _key("store_id", Integer),
    _key("glob", _text()),
    _said("rules", _text()),
    _said("n"),
    _said("time_ns"),
)
"""`rules`: as JSON."""

events: Final = Table(
    "events",
    metadata,
    _key("store_id", Integer),
    _key("n"),
    _key("position", Integer),
    _said("time_ns"),
    _said("actor", _text()),
    _said("op", _text()),
    Column("ref", _text()),
    Column("root", _text()),
    Column("ulid", _text()),
    _said("detail", _text()),
    Index("events_time", "time_ns"),
)
"""Every operation in the log; `detail` is JSON, with counts instead of long lists."""

gc_runs: Final = Table(
    "gc_runs",
    metadata,
    _key("store_id", Integer),
    _key("n"),
    _said("time_ns"),
    _said("actor", _text()),
    *(_said(f"{what}_{kind}") for what in ("condemned", "swept", "rescued") for kind in ("packs", "parts", "snapshots", "moved")),
    _said("relocated_packs"),
    _said("purged_windows"),
    Column("settled_n", BigInteger),
)
"""What gc listed, entry by entry."""

OF_STORES: Final = (jobs, snapshots, refs, tags, pins, policies, events, gc_runs)
"""Every table with a `store_id`."""


def snapshot_id(store_id: int, n: int, place: int) -> int:
    """The id of a snapshot that entry `n` put."""
    return store_id << STORE_BITS | n << PUT_BITS | place
