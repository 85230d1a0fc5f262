"""Statistics of one tensor or of a group, read in the background when somebody asks, with histograms as SVG."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.common.buffers import batches
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.store.internals import open_content
from tensorstore_ck.ui.background import Progress, Read
from tensorstore_ck.ui.catalog_snapshots import CatalogSnapshot, find_snapshot
from tensorstore_ck.ui.pages import Pages, asked
from tensorstore_ck.ui.snapshot import code_of_tensor
from tensorstore_ck.ui.snapshot_content import info_of
from tensorstore_ck.ui.snapshot_tensors import MAX_SHOWN, key_of, number_of
from tensorstore_ck.ui.sources import StoreKey

if TYPE_CHECKING:
    from tensorstore_ck.state.read_pieces import StoredTensor
    from tensorstore_ck.state.statistics import ChangeStatistics, Histogram, TensorStatistics

BINS: Final = 40
MAX_HISTOGRAMS: Final = 500
"""Larger groups have no histograms, which take five times as long; a single tensor always has one."""
MAX_HISTOGRAM_BYTES: Final = 256 << 20
STEP_BYTES: Final = 256 << 20
"""Bytes read between two checks whether a page still shows the read."""
WIDTH: Final = 400
HEIGHT: Final = 100
LEAST: Final = 2.0
"""The minimum height of a bin that has elements."""


class Bar(NamedTuple):
    """A bin of a histogram."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True, slots=True)
class TensorNumbers:
    """The statistics of some tensors, those with NaN or infinity first."""

    tensors: "tuple[TensorStatistics | ChangeStatistics, ...]"

    @property
    def nan(self) -> int:
        """NaN elements."""
        return sum(tensor.nan or 0 for tensor in self.tensors)

    @property
    def inf(self) -> int:
        """Infinite elements."""
        return sum(tensor.inf or 0 for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class GroupStatistics(TensorNumbers):
    """Statistics of tensors."""

    has_histograms: bool


def page(pages: Pages, request: Request) -> Response:
    """The statistics of the tensor ``tensor``, or of the group ``group``."""
    store = pages.store_of(request)
    snapshot = find_snapshot(pages, store, asked(request.query_params, "at"))
    tensor, group, first = request.query_params.get("tensor"), request.query_params.get("group", ""), number_of(request, "first")
    read = read_statistics(pages, store=store, snapshot=snapshot, tensor=tensor, group=group)
    statistics = read.result if isinstance(read.result, GroupStatistics) else None
    query = {"at": snapshot.ulid, "tensor": tensor, "group": group or None}
    return pages.render(
        "snapshot_statistics.html",
        "snapshot",
        store=store,
        snapshot=snapshot,
        name=tensor or group or "All tensors",
        key=key_of(tensor if tensor is not None else f"group {group}"),
        read=read,
        found=statistics,
        rows=statistics.tensors[first : first + MAX_SHOWN] if statistics is not None else (),
        first=first,
        bars_of=bars_of,
        code=code_of_tensor(pages, store, snapshot.root, tensor) if tensor is not None else "",
        url=pages.link("snapshot/statistics", store, **query, first=first or None),
        next_url=pages.link("snapshot/statistics", store, **query, first=first + MAX_SHOWN),
    )


def read_statistics(pages: Pages, store: StoreKey, snapshot: CatalogSnapshot, tensor: str | None, group: str) -> Read:
    """The read of the statistics of a tensor, or of a group; it begins now unless it was made before."""
    looks = pages.sources.looks
    kind = f"statistics {snapshot.ulid} " + (f"tensor {tensor}" if tensor is not None else f"group {group}")

    def is_wanted(name: str) -> bool:
        return name == tensor if tensor is not None else not group or name.startswith(f"{group}.")

    def work(progress: Progress) -> GroupStatistics:
        from tensorstore_ck.state.read_pieces import stored_tensors  # noqa: PLC0415 - loads torch
        from tensorstore_ck.state.statistics import statistics_of  # noqa: PLC0415

        with looks.alone(progress):
            progress("reading the tables", 0, 0)
            content = open_content(pages.sources.open(store), info_of(pages, store, snapshot))
            tensors = {name: stored for name, stored in stored_tensors(content).items() if is_wanted(name)}
            if not tensors:
                raise NotFoundError(f"it has no tensor {tensor or group!r}; states of single ranks have no statistics", object_id=kind)
            total = sum(map(size_of, tensors.values()))
            bins = BINS if (len(tensors) <= MAX_HISTOGRAMS and total <= MAX_HISTOGRAM_BYTES) or tensor is not None else 0
            statistics: list[TensorStatistics] = []
            done = 0
            for batch in batches(tensors.items(), lambda stored: size_of(stored[1]), STEP_BYTES):
                progress(f"reading tensors: {human_bytes(done)} of {human_bytes(total)}", done, total)
                statistics += statistics_of(dict(batch), bins)
                done += sum(size_of(stored) for _, stored in batch)
        return GroupStatistics(tuple(sorted(statistics, key=lambda stored: not (stored.nan or stored.inf))), bool(bins))

    return looks.read_once(store.uuid, kind, work)


def size_of(tensor: "StoredTensor") -> int:
    """Bytes of a tensor's elements."""
    return tensor.count * tensor.form.dtype.itemsize


def bars_of(histogram: "Histogram") -> list[Bar]:
    """The bins that have elements, as rectangles in `WIDTH` times `HEIGHT`."""
    most, width = max(histogram.counts), WIDTH / len(histogram.counts)
    bars = []
    for number, count in enumerate(histogram.counts):
        if count:
            height = max(LEAST, HEIGHT * count / most)
            title = f"{count:,} from {histogram.edges[number]:.6g} to {histogram.edges[number + 1]:.6g}"
            x, y, wide, high = (round(size, 2) for size in (number * width, HEIGHT - height, width - 1, height))
            bars.append(Bar(x, y, wide, high, title=title))
    return bars
