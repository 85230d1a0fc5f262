"""Addresses that complete what was typed into a field, from the catalog."""

import re
from typing import Final

from sqlalchemy import Connection, select
from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.catalog.schema import refs, snapshots, tags
from tensorstore_ck.ui.pages import Pages

MAX_OFFERED: Final = 30
_HEX: Final = re.compile(r"[0-9a-f]{4,64}")


def page(pages: Pages, request: Request) -> Response:
    """The options for the field whose name is ``of`` in the query."""
    store = pages.store_of(request)
    typed = request.query_params.get(request.query_params.get("of", ""), "").strip()[:400]
    if not typed.isprintable():
        return pages.part("addresses.html", offered=[])
    with pages.sources.catalog.reading() as connection:
        return pages.part("addresses.html", offered=complete(connection, store.store_id, typed))


def complete(connection: Connection, store_id: int, typed: str) -> list[tuple[str, str]]:
    """Addresses and their kinds: branches and tags whose names contain the text, steps after an ``@``, roots that begin with the text."""
    name, at, step = typed.partition("@")
    if at:
        with_step = select(snapshots.c.step).where(snapshots.c.ref == name, snapshots.c.store_id == store_id, snapshots.c.step.is_not(None))
        rows = connection.execute(with_step.where(snapshots.c.state == "live").order_by(snapshots.c.id.desc()))
        steps = dict.fromkeys(row.step for row in rows if str(row.step).startswith(step))
        return [(f"{name}@{number}", "step") for number in list(steps)[:MAX_OFFERED]]
    offers: list[tuple[str, str]] = []
    for table, kind in ((refs, "branch"), (tags, "tag")):
        named = select(table.c.name).where(table.c.store_id == store_id, table.c.name.contains(typed, autoescape=True))
        offers += [(row.name, kind) for row in connection.execute(named.order_by(table.c.name).limit(MAX_OFFERED))]
    if _HEX.fullmatch(typed):
        begins = snapshots.c.root >= typed, snapshots.c.root < typed + "g", snapshots.c.store_id == store_id
        rows = connection.execute(select(snapshots.c.root, snapshots.c.ref, snapshots.c.step).where(*begins).limit(MAX_OFFERED))
        offers += [(row.root, row.ref if row.step is None else f"{row.ref} step {row.step}") for row in rows]
    if len(offers) == 1 and offers[0] == (typed, "branch"):
        offers.append((f"{typed}~1", "the one before"))
    return offers[:MAX_OFFERED]
