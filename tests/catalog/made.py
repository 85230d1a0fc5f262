"""Stores with histories to feed from, and what a catalog says of one, in a form that can be compared."""

import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select

from tensorstore_ck.catalog import Catalog
from tensorstore_ck.catalog.schema import STORE_BITS, metadata, snapshot_id
from tensorstore_ck.common.ids import new_ulid
from tensorstore_ck.format.record import Record
from tensorstore_ck.log import Op
from tensorstore_ck.store import Store

Dump = dict[str, list[tuple[Any, ...]]]
NOT_OF_THE_LOG = ("store_id", "url", "synced_ns")


def publish(store: Store, ref: str, step: int | None = None, metrics: Mapping[str, float] | None = None, **fields: Any) -> str:
    """The entry of a save, without objects behind it; its root."""
    engine = store.engine
    head = engine.log.view().branch(ref)
    parent = head.root if head is not None else None
    sizes = fields.get("logical_bytes", 1000), fields.get("new_bytes", 100)
    record = Record(
        ref,
        step,
        parent,
        b"\x80",
        {name: float(value) for name, value in (metrics or {}).items()},
        fields.get("made_ns", engine.clock()),
        [new_ulid()],
        new_ulid() * 2,
        *sizes,
    )
    put = Op.put(ref, new_ulid(), record, record.encode(), anchor=0, txn=new_ulid())
    engine.log.append(lambda _: [put])
    return record.root().hex()


def dump(catalog: Catalog, store: Store) -> Dump:
    """Every row that a catalog has of a store, but for what does not follow from the log."""
    found: Dump = {}
    with catalog._database.reading() as connection:
        stores = metadata.tables["stores"]
        at = connection.execute(select(stores.c.store_id).where(stores.c.uuid == store.engine.config.uuid)).scalar_one()
        for name, table in metadata.tables.items():
            if name == "catalog_version":
                continue
            its = (
                table.c.snapshot.between(snapshot_id(at, 0, 0), snapshot_id(at + 1, 0, 0))
                if name in ("metrics", "attributes")
                else table.c.store_id == at
            )
            rows = [row._asdict() for row in connection.execute(select(table).where(its))]
            found[name] = sorted((tuple(_value(*item) for item in row.items() if item[0] not in NOT_OF_THE_LOG) for row in rows), key=repr)
    return found


def _value(name: str, value: object) -> object:
    if name in ("id", "snapshot") and isinstance(value, int):
        return value % (1 << STORE_BITS)
    return "nan" if isinstance(value, float) and math.isnan(value) else value
