"""The activity page: the operations in the logs of all stores, newest first."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, select, tuple_
from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.catalog.read_entries import CHANGED_TABLES
from tensorstore_ck.catalog.row_writer import MAX_BIGINT
from tensorstore_ck.catalog.schema import events, stores
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.ui.pages import Pages, count_text, time_text
from tensorstore_ck.ui.sources import StoreKey

PAGE_ROWS: Final = 50
_STORES: Final = select(stores.c.store_id, stores.c.uuid, stores.c.url).order_by(stores.c.url, stores.c.uuid)
_KEY: Final = re.compile(r"-?\d{1,19}(\.\d{1,18}){3}")
_ORDER: Final = (events.c.time_ns, events.c.store_id, events.c.n, events.c.position)
WORDS: Final[Mapping[str, str]] = {
    "put": "saved",
    "staged": "saved to a staging disk",
    "branch": "made a branch",
    "reset": "moved a branch",
    "tag": "tagged",
    "untag": "removed a tag",
    "annotate": "added metrics",
    "mark": "marked",
    "abort": "gave up a save",
    "pin": "pinned",
    "unpin": "removed a pin",
    "policy": "changed a policy",
    "expire": "removed from the history",
    "undo": "restored",
    "purge": "ended an undo window",
    "condemn": "gc: will delete",
    "rescue": "kept from gc",
    "sweep": "gc: deletes",
    "relocate": "gc: compacted",
    "place": "moved to a cold location",
    "settle": "gc: forgot deleted objects",
    "quota": "changed a quota",
    "report": "ran gc or fsck",
    "finished": "training finished",
    "sign": "signed",
}
"""Operation -> what a user did, or what happened."""
_SIZES: Final = {"logical_bytes": "", "new_bytes": " new"}


@dataclass(frozen=True, slots=True)
class Event:
    """An operation of a log entry."""

    store: StoreKey
    n: int
    position: int
    time_ns: int
    actor: str
    op: str
    ref: str | None
    root: str | None
    what: str
    key: str
    """Where the next page continues. Store, entry and position distinguish operations of the same time."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The requested operations; an empty field: all."""

    store: str
    """The uuid of a store."""
    ref: str
    op: str
    before: str
    """The key of the last row of the page before."""

    @property
    def query(self) -> Mapping[str, object]:
        """The query of this page, without its position in the list."""
        return {"store": self.store or None, "ref": self.ref or None, "op": self.op or None}


def page(pages: Pages, request: Request) -> Response:
    """The page."""
    query = request.query_params
    before = query.get("before", "")
    wanted = Asked(query.get("store", ""), query.get("ref", ""), query.get("op", ""), before if _is_key(before) else "")
    pages.sources.refresh()
    with pages.sources.catalog.reading() as connection:
        known = [StoreKey(*row) for row in connection.execute(_STORES)]
        rows = read_events(connection, wanted, known)
    ops = sorted({*CHANGED_TABLES, *([wanted.op] if wanted.op else [])}, key=lambda op: WORDS.get(op, op))
    return pages.render(
        "activity.html",
        "activity",
        wanted=wanted,
        events=rows[:PAGE_ROWS],
        after=rows[PAGE_ROWS - 1].key if len(rows) > PAGE_ROWS else None,
        known=known,
        ops=ops,
        words=WORDS,
    )


def read_events(connection: Connection, wanted: Asked, known: Sequence[StoreKey]) -> list[Event]:
    """A page of operations of the known stores, and the first of the next page."""
    keys = {key.store_id: key for key in known}
    query = select(events)
    if wanted.store:
        store_id = next((key.store_id for key in known if key.uuid == wanted.store), -1)
        # as an expression, so that SQLite keeps to the index of the ref or the operation
        column = events.c.store_id + 0 if wanted.ref or wanted.op else events.c.store_id
        query = query.where(column == store_id)
    if wanted.ref:
        query = query.where(events.c.ref == wanted.ref)
    if wanted.op:
        query = query.where(events.c.op == wanted.op)
    if wanted.before:
        key = tuple(map(int, wanted.before.split(".")))
        query = query.where(events.c.time_ns <= key[0], tuple_(*_ORDER) < tuple_(*key))
    rows = connection.execute(query.order_by(*(column.desc() for column in _ORDER)).limit(PAGE_ROWS + 1))
    return [
        Event(
            store=keys[row.store_id],
            n=row.n,
            position=row.position,
            time_ns=row.time_ns,
            actor=row.actor,
            op=row.op,
            ref=row.ref,
            root=row.root,
            what=what_text(parse_json(row.detail)),
            key=f"{row.time_ns}.{row.store_id}.{row.n}.{row.position}",
        )
        for row in rows
    ]


def what_text(detail: Mapping[str, Any]) -> str:
    """The fields of an operation on one line."""
    texts = []
    for name, value in detail.items():
        if name in _SIZES:
            texts.append(human_bytes(value) + _SIZES[name])
        elif name == "step":
            texts.append(f"step {count_text(value)}")
        elif name.endswith("_ns"):
            texts.append(f"{name.removesuffix('_ns')} {time_text(value)} UTC" if name == "expires_ns" else f"{value / 1e9:.1f} s")
        elif name == "counted":
            texts.append("without effect: aborted before, or put again")
        elif value != "":
            texts.append(f"{name} {count_text(value) if isinstance(value, int) else value}")
    return ", ".join(texts)


def _is_key(text: str) -> bool:
    """Whether it is the key of an event, with a time that a database holds."""
    return _KEY.fullmatch(text) is not None and abs(int(text.partition(".")[0])) <= MAX_BIGINT
