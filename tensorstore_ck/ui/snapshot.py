"""The page of one snapshot: the facts in the catalog at once, and its content as soon as its tables are read.

With code to copy that opens the snapshot: it works as printed, except that it lacks secrets. Why a snapshot is kept, and who signed it, is
a piece of its own, since both may read the whole history of a branch.
"""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.errors import StoreError
from tensorstore_ck.ui.background import Read
from tensorstore_ck.ui.catalog_snapshots import CatalogFacts, CatalogSnapshot, find_snapshot, read_facts
from tensorstore_ck.ui.pages import Pages, asked
from tensorstore_ck.ui.snapshot_content import Contents, codecs_text, patience_of, read_contents
from tensorstore_ck.ui.snapshot_tensors import MAX_SHOWN, entries_of, key_of, values_of
from tensorstore_ck.ui.sources import StoreKey


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


_PLAIN_URL: Final = re.compile(r"(/|[a-z0-9]+://)[A-Za-z0-9._/+=-]+")
"""Matches a store URL that can follow ``::`` in an fsspec URL: one without special characters."""


class Code(NamedTuple):
    """Some lines to copy."""

    title: str
    text: str


def code_of(pages: Pages, store: StoreKey, facts: CatalogFacts) -> list[Code]:
    """Code for Python, the command line and fsspec."""
    root, marked = facts.short_root, bool(facts.snapshot.mark)
    allow = ", allow_marked=True" if marked else ""
    blocks = [Code("Python", "\n".join([*_opened(pages, store), f"    state = store.checkout({root!r}{allow})"]))]
    blocks.append(Code("Command line", pages.command(store, "show", root)))
    blocks.append(Code("Command line: into a file", pages.command(store, "get", root, "state.pt", *(["--allow-marked"] if marked else []))))
    if facts.parent is not None and facts.parent.state != "gone":
        blocks.append(Code("Command line: changes since the parent", pages.command(store, "diff", f"{root}~1", root)))
    options = {key: value for key, value in pages.open_options.items() if key in ("cache_dir", "places")}
    if "storage_options" in pages.open_options:
        options["target_options"] = pages.open_options["storage_options"]
    files = f"files = fsspec.filesystem('tsck', store={store.url!r}{_arguments(options)})"
    text = ["import fsspec", "", files, f"print(files.ls({root!r}, detail=False))", f"about = files.cat_file('{root}/snapshot.json')"]
    blocks.append(Code("fsspec", "\n".join(text)))
    if _PLAIN_URL.fullmatch(store.url) and not pages.open_options:
        blocks.append(Code("A path for programs that use fsspec", f"tsck://{root}/snapshot.json::{store.url}"))
    return blocks


def code_of_tensor(pages: Pages, store: StoreKey, root: str, tensor: str) -> str:
    """Code that reads one tensor."""
    lines = [f"    with store.open_snapshot({root!r}) as snapshot:", f"        tensor = snapshot[{tensor!r}][...]"]
    return "\n".join([*_opened(pages, store), *lines])


def _opened(pages: Pages, store: StoreKey) -> list[str]:
    options = _arguments({"read_only": True, **pages.open_options})
    return ["import tensorstore_ck as tsck", "", f"with tsck.open({store.url!r}{options}) as store:"]


def _arguments(options: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


@dataclass(frozen=True, slots=True)
class Kept:
    """Why a snapshot stays."""

    by: tuple[str, ...]
    """Tags, pins and rules."""
    goes: bool
    """Policies remove it with the next save."""
    error: str = ""
    """Why the reasons are unknown; empty if they are known."""
    signatures: tuple[str, ...] = ()
    """For each ref at this snapshot that the trust file names: its signer."""
    distrust: tuple[str, ...] = ()
    """For each such ref without a valid signature: the reason."""


def kept_page(pages: Pages, request: Request) -> Response:
    """The piece, which is also a page of its own."""
    store = pages.store_of(request)
    snapshot = find_snapshot(pages, store, asked(request.query_params, "at"))
    with pages.sources.catalog.reading() as connection:
        facts = read_facts(connection, store.store_id, snapshot)
    return pages.render(
        "snapshot_kept.html",
        "snapshot",
        store=store,
        snapshot=snapshot,
        facts=facts,
        kept=_kept(pages, store, snapshot, [*facts.branches, *facts.tags]),
    )


def _kept(pages: Pages, store: StoreKey, snapshot: CatalogSnapshot, names: Iterable[str]) -> Kept:
    if snapshot.state == "gone":
        return Kept((), goes=True)
    try:
        by = pages.sources.open(store).explain_retention(snapshot.ref).get(snapshot.ulid, ())
    except StoreError as exc:
        return Kept((), goes=False, error=str(exc))
    goes = by[:1] == ("goes",)
    signatures, distrust = _signatures(pages, store, names)
    return Kept(by[1:] if goes else by, goes, signatures=signatures, distrust=distrust)


def _signatures(pages: Pages, store: StoreKey, refs: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The signer of each ref that the trust file names; and the reasons for which the others are not trusted."""
    signed, distrust = [], []
    for ref in refs:
        try:
            signature = pages.sources.open(store).signature(ref)
        except StoreError as exc:
            distrust.append(str(exc))
        else:
            signed += [] if signature is None else [f"{ref} is signed by {signature.key}"]
    return tuple(signed), tuple(distrust)
