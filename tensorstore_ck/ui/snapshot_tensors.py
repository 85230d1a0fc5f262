"""The long pieces of a snapshot's page: the tensors of a group, or with a name, and the values. Each is also a page of its own."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.redaction import one_line
from tensorstore_ck.ui.background import Read
from tensorstore_ck.ui.catalog_snapshots import CatalogSnapshot, find_snapshot
from tensorstore_ck.ui.pages import Pages, asked
from tensorstore_ck.ui.snapshot_content import Contents, TensorGroup, TensorRow, matching, patience_of, read_contents
from tensorstore_ck.ui.sources import StoreKey

MAX_SHOWN: Final = 200
"""Entries of a group, or values, at a time."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Some of the groups and tensors in a group; or some of the tensors that a text matches."""

    path: str
    """The path of the group; empty: the whole tree."""
    filter: str
    groups: tuple[tuple[str, TensorGroup], ...]
    tensors: tuple[tuple[str, TensorRow], ...]
    """With the names to show."""
    count: int
    """The number of tensors in the group, or that match."""
    size_bytes: int
    next: int | None
    """The number of the first entry of the next piece."""


@dataclass(frozen=True, slots=True)
class Values:
    """Some of the values."""

    filter: str
    rows: tuple[tuple[str, str], ...]
    """Path and text."""
    first: int
    count: int
    """The number of values that match."""


def key_of(name: str) -> str:
    """A short text for the id of an element that shows something with a name."""
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=8).hexdigest()


def entries_of(tree: TensorGroup, path: str = "", text: str = "", first: int = 0) -> Entries:
    """The entries from `first` on. Raises `NotFoundError` if there is no such group."""
    if text:
        tensors = matching(tree.tensors(), text)
        shown: Sequence[tuple[str, TensorGroup | TensorRow]] = [(tensor.path, tensor) for tensor in tensors]
        count, size_bytes = len(tensors), sum(tensor.size_bytes for tensor in tensors)
    else:
        group = tree.find(path)
        if group is None:
            raise NotFoundError(f"this snapshot has no group {path!r}", object_id=path)
        shown, count, size_bytes = group.shown(), group.count, group.size_bytes
    part = shown[first : first + MAX_SHOWN]
    return Entries(
        path=path,
        filter=text,
        groups=tuple((name, entry) for name, entry in part if isinstance(entry, TensorGroup)),
        tensors=tuple((name, entry) for name, entry in part if isinstance(entry, TensorRow)),
        count=count,
        size_bytes=size_bytes,
        next=first + MAX_SHOWN if len(shown) > first + MAX_SHOWN else None,
    )


def values_of(contents: Contents, text: str = "", first: int = 0) -> Values:
    """The values from `first` on whose path or text contains a text."""
    rows = [(path, value_text(value)) for path, value in contents.details.values.items()]
    if text:
        lower = text.lower()
        rows = [row for row in rows if lower in row[0].lower() or lower in row[1].lower()]
    return Values(text, tuple(rows[first : first + MAX_SHOWN]), first, len(rows))


def value_text(value: Any) -> str:
    """A value on one line."""
    return one_line(value if isinstance(value, str) else str(value))


def read_asked(pages: Pages, request: Request) -> tuple[StoreKey, CatalogSnapshot, Read, Contents | None]:
    """The store, the snapshot and the contents that a request names."""
    store = pages.store_of(request)
    snapshot = find_snapshot(pages, store, asked(request.query_params, "at"))
    read = read_contents(pages, store, snapshot, patience_of(request))
    return store, snapshot, read, read.result if isinstance(read.result, Contents) else None


def number_of(request: Request, name: str) -> int:
    """A number from 0 on in the query; 0 if there is none."""
    text = request.query_params.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def page(pages: Pages, request: Request) -> Response:
    """The tensors of the group ``group``, or those that ``q`` matches."""
    store, snapshot, read, contents = read_asked(pages, request)
    path, text, first = request.query_params.get("group", ""), request.query_params.get("q", "").strip(), number_of(request, "first")
    return pages.render(
        "snapshot_tensors.html",
        "snapshot",
        store=store,
        snapshot=snapshot,
        read=read,
        entries=entries_of(contents.tensors, path, text, first) if contents is not None else None,
        path=path,
        q=text,
        first=first,
        key=key_of(f"{path}\n{text}"),
        key_of=key_of,
        url=pages.link("snapshot/tensors", store, at=snapshot.ulid, group=path or None, q=text or None, first=first or None),
    )


def values_page(pages: Pages, request: Request) -> Response:
    """The values whose path or text contains ``q``."""
    store, snapshot, read, contents = read_asked(pages, request)
    text, first = request.query_params.get("q", "").strip(), number_of(request, "first")
    return pages.render(
        "snapshot_values.html",
        "snapshot",
        store=store,
        snapshot=snapshot,
        read=read,
        values=values_of(contents, text, first) if contents is not None else None,
        max_shown=MAX_SHOWN,
        url=pages.link("snapshot/values", store, at=snapshot.ulid, q=text or None, first=first or None),
    )


def value_page(pages: Pages, request: Request) -> Response:
    """All of a value, or of an entry of the metadata, as text."""
    *_, read, contents = read_asked(pages, request)
    if contents is None:
        return PlainTextResponse(f"{read.error or 'The tables of this snapshot are being read'}: load this page again.\n", 503)
    for name, values in (("path", contents.details.values), ("metadata", contents.details.metadata)):
        if request.query_params.get(name) in values:
            value = values[request.query_params[name]]
            return PlainTextResponse(value if isinstance(value, str) else repr(value))
    raise NotFoundError("this snapshot has no such value", object_id=request.query_params.get("path", ""))
