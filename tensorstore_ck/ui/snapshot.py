"""The page of one snapshot: the facts in the catalog at once, and its content as soon as its tables are read."""

import time

from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.errors import StoreError
from tensorstore_ck.ui.background import Read
from tensorstore_ck.ui.catalog_snapshots import find_snapshot, read_facts
from tensorstore_ck.ui.pages import Pages
from tensorstore_ck.ui.snapshot_code import code_of
from tensorstore_ck.ui.snapshot_content import Contents, patience_of, read_contents
from tensorstore_ck.ui.snapshot_tensors import MAX_SHOWN, entries_of, key_of, values_of
from tensorstore_ck.ui.tensor_tree import codecs_text


def page(pages: Pages, request: Request) -> Response:
    """The page; without ``at`` in the query, or if nothing is there, the form that asks for an address."""
    store = pages.store_of(request)
    address = request.query_params.get("at", "").strip()
    if not address:
        return pages.render("no_snapshot.html", "snapshot", store=store, address="", error="")
    try:
        snapshot = find_snapshot(pages, store, address)
    except StoreError as exc:
        return pages.render("no_snapshot.html", "snapshot", 404, store=store, address=address, error=str(exc))
    with pages.sources.catalog.reading() as connection:
        facts = read_facts(connection, store.store_id, snapshot)
    read = read_contents(pages, store, snapshot, patience_of(request)) if snapshot.state != "gone" else Read()
    contents = read.result if isinstance(read.result, Contents) else None
    return pages.render(
        "snapshot.html",
        "snapshot",
        store=store,
        snapshot=snapshot,
        facts=facts,
        age_ns=time.time_ns() - snapshot.time_ns,
        read=read,
        contents=contents,
        entries=entries_of(contents.tensors) if contents is not None else None,
        values=values_of(contents) if contents is not None else None,
        metadata=_metadata(contents) if contents is not None else [],
        code_blocks=code_of(pages, store, facts) if snapshot.state != "gone" else [],
        max_shown=MAX_SHOWN,
        key_of=key_of,
        codecs_text=codecs_text,
    )


def _metadata(contents: Contents) -> list[tuple[str, str]]:
    return [(key, value if isinstance(value, str) else repr(value)) for key, value in contents.details.metadata.items()]
