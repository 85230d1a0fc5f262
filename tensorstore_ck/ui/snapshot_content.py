"""The contents of a snapshot: read from its tables in the background, and kept for the next page."""

from dataclasses import dataclass
from typing import Final

from sqlalchemy import func, select
from starlette.requests import Request

from tensorstore_ck.catalog.schema import gc_runs
from tensorstore_ck.common.ids import parse_ulid
from tensorstore_ck.errors import SnapshotExpiredError
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.log.snapshot import SnapshotDetails
from tensorstore_ck.store.internals import describe_with_costs, log_of
from tensorstore_ck.ui.background import PATIENCE_SECONDS, Progress, Read
from tensorstore_ck.ui.catalog_snapshots import CatalogSnapshot
from tensorstore_ck.ui.pages import Pages
from tensorstore_ck.ui.sources import StoreKey
from tensorstore_ck.ui.tensor_tree import TensorGroup, tensor_tree

FIRST_SECONDS: Final = 0.3
"""A page that has other contents waits at most this long."""


@dataclass(frozen=True, slots=True)
class Contents:
    """A snapshot's tables."""

    details: SnapshotDetails
    tensors: TensorGroup


def patience_of(request: Request) -> float:
    """How many seconds a page waits for a read: longer if htmx asks, since the browser shows the rest of the page already."""
    return PATIENCE_SECONDS if "hx-request" in request.headers else FIRST_SECONDS


def read_contents(pages: Pages, store: StoreKey, snapshot: CatalogSnapshot, patience_seconds: float) -> Read:
    """The read of a snapshot's `Contents`. Begins now unless it was made since the last gc, which may have changed the stored sizes."""
    with pages.sources.catalog.reading() as connection:
        last_gc = connection.execute(select(func.max(gc_runs.c.n)).where(gc_runs.c.store_id == store.store_id)).scalar()
    kind = f"contents {snapshot.ulid} {last_gc or 0}"

    def work(progress: Progress) -> Contents:
        progress("reading the tables of this snapshot", 0, 0)
        details, costs = describe_with_costs(pages.sources.open(store), info_of(pages, store, snapshot))
        return Contents(details, tensor_tree(details, costs))

    return pages.sources.looks.read_once(store.uuid, kind, work, patience_seconds)


def info_of(pages: Pages, store: StoreKey, snapshot: CatalogSnapshot) -> SnapshotInfo:
    """The snapshot as the store has it now. Raises `SnapshotExpiredError` if gc has freed it."""
    view, ulid = log_of(pages.sources.open(store)).readable_view(), parse_ulid(snapshot.ulid)
    info = view.snapshot(ulid) if ulid is not None else None
    if info is None or not view.is_live(info.ulid):
        raise SnapshotExpiredError("nothing holds this snapshot any more: gc has freed it, or will", object_id=snapshot.root)
    return info
