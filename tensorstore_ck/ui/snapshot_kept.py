"""A piece of a snapshot's page: why the snapshot is kept, and who signed it. Both may read the whole history of a branch."""

from collections.abc import Iterable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.errors import StoreError
from tensorstore_ck.ui.catalog_snapshots import CatalogSnapshot, find_snapshot, read_facts
from tensorstore_ck.ui.pages import Pages, asked
from tensorstore_ck.ui.sources import StoreKey


@dataclass(frozen=True, slots=True)
class Kept:
    """Why a snapshot stays."""

    by: tuple[str, ...]
    """Tags, pins and rules."""
    goes: bool
    """Policies remove it with the next save."""
    error: str = ""
    """Why that is not known."""
    signatures: tuple[str, ...] = ()
    """Of each ref that the trust file names and that is here: who signed it."""
    distrust: tuple[str, ...] = ()
    """Of those without a valid signature: why not."""


def page(pages: Pages, request: Request) -> Response:
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
    """Who signed each ref that the trust file names; and why the others are not trusted."""
    signed, distrust = [], []
    for ref in refs:
        try:
            signature = pages.sources.open(store).signature(ref)
        except StoreError as exc:
            distrust.append(str(exc))
        else:
            signed += [] if signature is None else [f"{ref} is signed by {signature.key}"]
    return tuple(signed), tuple(distrust)
