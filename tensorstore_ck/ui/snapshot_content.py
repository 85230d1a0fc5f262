"""The contents of a snapshot: read from its tables in the background, and kept for the next page; and its tensors as a tree of groups."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sqlalchemy import func, select
from starlette.requests import Request

from tensorstore_ck.catalog.schema import gc_runs
from tensorstore_ck.common.ids import parse_ulid
from tensorstore_ck.errors import SnapshotExpiredError
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.snapshot import GroupCost, SnapshotDetails
from tensorstore_ck.store.internals import describe_with_costs, log_of
from tensorstore_ck.ui.background import PATIENCE_SECONDS, Progress, Read
from tensorstore_ck.ui.catalog_snapshots import CatalogSnapshot
from tensorstore_ck.ui.pages import Pages
from tensorstore_ck.ui.sources import StoreKey

MAX_DEPTH: Final = 32
"""The most levels of groups; a name with more dots keeps the rest of them."""


class TensorRow(NamedTuple):
    """A tensor."""

    path: str
    """Its full name."""
    name: str
    """The name in its group."""
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    stored_bytes: int | None
    codecs: str
    """The codecs of its blocks; empty: all bytes are in the snapshot's tables."""
    placement: str
    """How the ranks that saved it held it; empty: each held all of it."""

    @property
    def shape_text(self) -> str:
        """As people write it."""
        return " \N{MULTIPLICATION SIGN} ".join(f"{size}" for size in self.shape) or "scalar"


@dataclass(slots=True)
class TensorGroup:
    """Tensors whose names begin with the same path."""

    path: str
    name: str
    count: int = 0
    size_bytes: int = 0
    children: "list[TensorGroup | TensorRow]" = field(default_factory=list)
    """The groups and tensors below, in the state's order."""
    groups: "dict[str, TensorGroup]" = field(default_factory=dict)

    def tensors(self) -> Iterator[TensorRow]:
        """All of them, in the state's order of groups."""
        stack = [iter(self.children)]
        while stack:
            child = next(stack[-1], None)
            if child is None:
                stack.pop()
            elif isinstance(child, TensorRow):
                yield child
            else:
                stack.append(iter(child.children))

    def shown(self) -> "list[tuple[str, TensorGroup | TensorRow]]":
        """The children with their names. A group with a single child is merged with it."""
        shown: list[tuple[str, TensorGroup | TensorRow]] = []
        for child in self.children:
            name = child.name
            while isinstance(child, TensorGroup) and len(child.children) == 1:
                (child,) = child.children
                name = f"{name}.{child.name}"
            shown.append((name, child))
        return shown

    def find(self, path: str) -> "TensorGroup | None":
        """The group at a path; the whole tree at an empty one."""
        group: TensorGroup | None = self
        for name in path.split(".", MAX_DEPTH) if path else ():
            group = group.groups.get(name) if group is not None else None
        return group


def tensor_tree(details: SnapshotDetails, costs: Mapping[str, GroupCost]) -> TensorGroup:
    """The tree of all tensors; `costs`: of each."""
    tree = TensorGroup("", "")
    for path, dtype, shape, size_bytes in details.tensors:
        *parents, name = path.split(".", MAX_DEPTH)
        group, at = tree, ""
        group.count += 1
        group.size_bytes += size_bytes
        for parent in parents:
            at = f"{at}.{parent}" if group is not tree else parent
            child = group.groups.get(parent)
            if child is None:
                child = group.groups[parent] = TensorGroup(at, parent)
                group.children.append(child)
            group = child
            group.count += 1
            group.size_bytes += size_bytes
        cost, placement = costs.get(path), details.placements.get(path, "")
        codecs, stored = (codecs_text(cost), cost.stored_bytes) if cost is not None else ("", None)
        row = TensorRow(path, name, dtype, shape, size_bytes=size_bytes, stored_bytes=stored, codecs=codecs, placement=placement)
        group.children.append(row)
    return tree


def codecs_text(cost: GroupCost) -> str:
    """``fast 80%, raw 20%``, by raw bytes."""
    total = sum(cost.codecs.values())
    shares = sorted(cost.codecs.items(), key=lambda share: -share[1])
    return ", ".join(name if len(shares) == 1 else f"{name} {size / total:.0%}" for name, size in shares)


def matching(tensors: Iterable[TensorRow], text: str) -> list[TensorRow]:
    """The tensors whose names contain `text`, ignoring case; ``*`` stands for any characters, ``?`` for any one."""
    pieces = [re.compile(re.escape(piece).replace(r"\?", "."), re.IGNORECASE | re.DOTALL) for piece in text.split("*") if piece]
    return [tensor for tensor in tensors if _has_in_order(tensor.path, pieces)]


def _has_in_order(name: str, pieces: Sequence[re.Pattern[str]]) -> bool:
    """Searches the pieces one after another: a pattern with ``.*`` for each star would backtrack through all combinations."""
    at = 0
    for piece in pieces:
        match = piece.search(name, at)
        if match is None:
            return False
        at = match.end()
    return True


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


def info_of(pages: Pages, store: StoreKey, snapshot: CatalogSnapshot) -> SnapshotRow:
    """The snapshot as the store has it now. Raises `SnapshotExpiredError` if gc has freed it."""
    view, ulid = log_of(pages.sources.open(store)).readable_view(), parse_ulid(snapshot.ulid)
    info = view.snapshot(ulid) if ulid is not None else None
    if info is None or not view.is_live(info.ulid):
        raise SnapshotExpiredError("nothing holds this snapshot any more: gc has freed it, or will", object_id=snapshot.root)
    return info
