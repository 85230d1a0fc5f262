"""Bytes used per ref, job and pack, per snapshot on request, and in total; and what gc can free of it.

Reads all parts once, no data of packs, and footers only of packs that have dead blocks or are new to this host. The figures are
exact, because extents have the stored size of each block: a block counts once per holder, at its present location. Headers, footers
and dead blocks of packs count only in `objects_bytes`.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.common.html_table import html_table
from tensorstore_ck.common.ids import Ulid, parse_ulid, ulid_text
from tensorstore_ck.common.prices import Prices
from tensorstore_ck.common.threads import REMOTE_THREADS, cpu_threads, for_each
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import at_newest
from tensorstore_ck.engine.reachability import locate_blocks
from tensorstore_ck.format.codec import codec_name
from tensorstore_ck.format.pack import ENTRY_DTYPE, HEADER, TRAILER
from tensorstore_ck.format.part import Part
from tensorstore_ck.gc.byte_sums import BlockSet, ByteSums, OwnerBytes, distinct_blocks
from tensorstore_ck.gc.live_bits import PackArray, read_parts
from tensorstore_ck.gc.options import GcOptions
from tensorstore_ck.gc.part_summary import SummaryCache, summarize
from tensorstore_ck.gc.plan import plan_gc
from tensorstore_ck.gc.report import Freeable, Progress, ProgressSum, ignore_progress
from tensorstore_ck.gc.roots import UNDO, roots
from tensorstore_ck.gc.space_forecast import SpaceForecast, forecast
from tensorstore_ck.log import FOLDERS, ObjectKey, RefTable, store_objects

_FOLDERS: Final = tuple(f"{folder}/" for folder in FOLDERS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """The bytes that some refs hold; a branch holds its whole history."""

    snapshots: int
    """Distinct snapshots."""
    logical_bytes: int
    """Sum of the snapshots' full sizes."""
    unique_bytes: int
    """Raw bytes of the distinct blocks, and of data inside parts."""
    stored_bytes: int
    """Stored bytes of these blocks, and of parts, records and relocation maps."""
    shared_bytes: int
    """The stored bytes that another ref (or job) holds, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefUsage(HeldBytes):
    """One branch or tag."""

    ref: str
    exclusive_bytes: int
    """The stored bytes that no other ref and no pin holds. They are freed when the ref is forgotten and undo windows have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUsage(HeldBytes):
    """The refs of one job: those with the same name up to the last '/'. A ref without a '/' is a job of its own."""

    job: str
    refs: int
    exclusive_bytes: int
    """The stored bytes that no ref of another job and no pin holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotUsage:
    """One snapshot that a ref or a pin holds."""

    id: str
    root: str
    ref: str
    """The branch that it was put to."""
    step: int | None
    held_by: tuple[str, ...]
    """Branches, tags, pins (``pin:owner``) and undo windows, as named by `roots`."""
    logical_bytes: int
    stored_bytes: int
    shared_bytes: int
    exclusive_bytes: int
    """The stored bytes that no other such snapshot refers to. gc frees them when nothing holds the snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackUsage:
    """One pack in the store."""

    name: str
    bytes: int
    live_bytes: int
    """Stored bytes of its held blocks."""
    live_ratio: float
    """Share of its blocks that are held, by bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecUsage:
    """Distinct held blocks of one codec."""

    codec: str
    blocks: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceUsage:
    """Packs at one other location."""

    url: str
    packs: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage(HeldBytes):
    """The bytes that all refs, pins and undo windows hold together, and the contents of the store."""

    refs: tuple[RefUsage, ...]
    jobs: tuple[JobUsage, ...]
    by_snapshot: tuple[SnapshotUsage, ...] | None
    """Oldest first; only on request."""
    packs: tuple[PackUsage, ...]
    """Smallest live ratio first."""
    places: tuple[PlaceUsage, ...]
    """Other locations, to which packs were moved."""
    codecs: tuple[CodecUsage, ...]
    """Most raw bytes first."""
    pinned_bytes: int
    """The stored bytes that pins hold, and no ref."""
    undo_bytes: int
    """The stored bytes that only undo windows hold."""
    objects_bytes: int
    """All listed objects of the store, at all locations."""
    unreferenced_bytes: int
    """Bytes in packs, parts, records and relocation maps that nothing holds, without the overhead of held blocks."""
    freeable: Freeable
    """The bytes that gc frees now, and those that it frees later, with the reason."""
    url: str
    """The store's own location."""
    space: SpaceForecast
    """The free space there, and how long it will last."""

    @property
    def is_full(self) -> bool:
        """Whether a snapshot of the mean size of some ref is larger than the free space at the store's own location."""
        free = self.space.free_bytes
        return free is not None and any(ref.logical_bytes > free * ref.snapshots for ref in self.refs)

    @property
    def by_location(self) -> dict[str, int]:
        """All bytes of the store by URL, its own location first."""
        cold = {place.url: place.bytes for place in self.places}
        return {self.url: self.objects_bytes - sum(cold.values()), **cold}

    @property
    def by_state(self) -> dict[str, int]:
        """All bytes of the store: live, pinned, undo_window, young, garbage, log_and_tables. A block counts for the first that applies."""
        young = min(sum(later.bytes for later in self.freeable.later if later.why == "age"), self.unreferenced_bytes)
        return {
            "live": self.stored_bytes - self.pinned_bytes - self.undo_bytes,
            "pinned": self.pinned_bytes,
            "undo_window": self.undo_bytes,
            "young": young,
            "garbage": self.unreferenced_bytes - young,
            "log_and_tables": max(0, self.objects_bytes - self.stored_bytes - self.unreferenced_bytes),
        }

    def __repr__(self) -> str:
        sizes = f"{human_bytes(self.logical_bytes)} stored as {human_bytes(self.stored_bytes)}"
        return f"Usage({len(self.refs):,} refs, {self.snapshots:,} snapshots, {sizes}, {human_bytes(self.objects_bytes)} in the store)"

    def _repr_html_(self) -> str:
        sizes = ("logical", "unique", "stored", "shared", "exclusive")
        rows = ([ref.ref, ref.snapshots, *(human_bytes(getattr(ref, f"{size}_bytes")) for size in sizes)] for ref in self.refs)
        return html_table(repr(self), ("ref", "snapshots", *sizes), rows)


def job_of(ref: str) -> str:
    """The job of a ref."""
    return ref.rpartition("/")[0] or ref


def measure_usage(engine: Engine, *, per_snapshot: bool = False, progress: Progress = ignore_progress) -> Usage:
    """The usage at the newest log entry. An error that `progress` raises ends it.

    Raises:
        DamageError: a record or part cannot be read; see `tsck fsck`.
    """
    return at_newest(engine.log, lambda _, view: _Measurement(engine, view, per_snapshot=per_snapshot, progress=progress).run())


class _Measurement:
    def __init__(self, engine: Engine, view: RefTable, *, per_snapshot: bool, progress: Progress) -> None:
        self._engine = engine
        self._progress = progress
        self._view = view
        self._held = roots(self._view)
        self._relocated = {pack for pack, _ in self._view.all_relocations()}
        self._sizes = {info.name: info.size_bytes for info in store_objects(engine.backend)}
        self._labels = sorted({label for labels in self._held.values() for label in labels})
        self._sums = ByteSums(self._labels)
        part_sizes = {ulid: size for name, size in self._sizes.items() if name.startswith("parts/") and (ulid := parse_ulid(name[-26:]))}
        self._summaries = SummaryCache(engine.table, part_sizes)
        chosen = sorted(ulid for ulid, labels in self._held.items() if labels != [UNDO]) if per_snapshot else []
        self._number = {ulid: number for number, ulid in enumerate(chosen)}
        self._owners = OwnerBytes(len(chosen))
        self._per_snapshot = per_snapshot
        self._lock = threading.Lock()
        self._read = ProgressSum(progress, "reading snapshots", len(self._held))

    def run(self) -> Usage:
        # Oldest first: the first snapshot of a pack usually uses all of its blocks, so the pack gets its final region at once.
        for_each(sorted(self._held), self._add_snapshot, cpu_threads() if self._engine.backend.is_local else REMOTE_THREADS)
        self._summaries.flush()
        return self._usage()

    def _add_snapshot(self, ulid: Ulid) -> None:
        info = self._view.snapshot(ulid)
        if info is None:
            return
        mask = self._sums.mask(self._held[ulid])
        number = self._number.get(ulid)
        moved: set[ObjectKey] = set()
        seen = PackArray(np.bool_)
        with self._lock:
            self._sums.add_snapshot(mask, info.logical_bytes)
        for part_ulid, part, size_bytes in read_parts(self._engine, info):
            blocks = self._blocks(part, moved)
            if self._summaries.get(part_ulid) is None:  # gc's plan, which comes next, need not read it again
                self._summaries.put(part_ulid, size_bytes, summarize(part, part.part_id()))
            with self._lock:
                self._add_object(mask, number=number, key=ObjectKey("part", part_ulid), size_bytes=size_bytes, raw_bytes=len(part.inline))
                self._sums.add_blocks(mask, blocks)
                if number is not None:
                    self._owners.add_blocks(number, blocks, seen)
        with self._lock:
            for key in (ObjectKey("snapshot", ulid), *moved):
                self._add_object(mask, number, key, self._sizes.get(key.name, 0))
        self._read.add(1)

    def _add_object(self, mask: int, number: int | None, key: ObjectKey, size_bytes: int, raw_bytes: int = 0) -> None:
        self._sums.add_object(mask, key, size_bytes, raw_bytes)
        if number is not None:
            self._owners.add_object(number, key, size_bytes)

    def _blocks(self, part: Part, moved: set[ObjectKey]) -> BlockSet:
        """The blocks of a part at their present locations; adds the relocation maps that lead there to `moved`."""
        if self._relocated.isdisjoint(part.packs):
            return distinct_blocks(part.packs, part.extents)
        located = locate_blocks(self._engine, self._view, part)
        moved.update(ObjectKey("moved", ulid) for ulid in located.moved)
        return distinct_blocks(located.packs, located.extents)

    def _usage(self) -> Usage:
        refs = [label for label in self._labels if label != UNDO and not label.startswith("pin:")]
        refs_of_job = Counter(map(job_of, refs))
        every, undo = self._sums.mask(refs), self._sums.mask([UNDO]) if UNDO in self._labels else 0
        held = self._sums.sums(bool)
        kept_bytes = sum(size for name, size in self._sizes.items() if name.startswith(_FOLDERS))
        packs = self._packs()
        overhead = sum(pack.live_bytes > 0 for pack in packs) * (HEADER.size + TRAILER.size) + ENTRY_DTYPE.itemsize * self._sums.blocks
        return Usage(
            **held._asdict(),
            shared_bytes=self._sums.sums(lambda mask: (mask & every).bit_count() > 1).stored_bytes,
            refs=tuple(RefUsage(ref=ref, **sums) for ref, sums in self._sums_of({ref: ref for ref in refs}, undo)),
            jobs=tuple(
                JobUsage(job=job, refs=refs_of_job[job], **sums) for job, sums in self._sums_of({ref: job_of(ref) for ref in refs}, undo)
            ),
            by_snapshot=tuple(self._snapshots()) if self._per_snapshot else None,
            packs=packs,
            places=self._places(),
            codecs=self._codecs(),
            pinned_bytes=self._sums.sums(lambda mask: not mask & every and mask != undo).stored_bytes,
            undo_bytes=self._sums.sums(lambda mask: mask == undo).stored_bytes,
            objects_bytes=sum(self._sizes.values()),
            unreferenced_bytes=max(0, kept_bytes - held.stored_bytes - overhead),
            freeable=plan_gc(self._engine, GcOptions(), self._progress).freeable,
            url=self._engine.backend.url,
            space=self._forecast(),
        )

    def _forecast(self) -> SpaceForecast:
        held = (info for ulid in self._held if (info := self._view.snapshot(ulid)) is not None)
        sizes, engine = self._sizes.values(), self._engine
        return forecast(held, space=engine.backend.space(), objects=len(sizes), objects_bytes=sum(sizes), now_ns=engine.clock())

    def _sums_of(self, groups: dict[str, str], undo: int) -> Iterator[tuple[str, dict[str, int]]]:
        """The sums for each group of refs among all refs, as fields of `RefUsage` and `JobUsage`."""
        for group, sums in self._sums.sums_of_groups(groups, undo).items():
            yield group, {**sums.held._asdict(), "shared_bytes": sums.shared_bytes, "exclusive_bytes": sums.exclusive_bytes}

    def _packs(self) -> tuple[PackUsage, ...]:
        live = {ObjectKey("pack", ulid).name: counted for ulid, counted in self._sums.live.items()}
        packs = []
        for name, size in self._sizes.items():
            if name.startswith(f"{FOLDERS['pack']}/"):
                count, live_bytes = live.get(name, (0, 0))
                filled = max(size - HEADER.size - TRAILER.size, 1)  # blocks, and a row of the footer for each
                ratio = min((live_bytes + count * ENTRY_DTYPE.itemsize) / filled, 1.0)
                packs.append(PackUsage(name=name, bytes=size, live_bytes=live_bytes, live_ratio=ratio))
        return tuple(sorted(packs, key=lambda pack: (pack.live_ratio, pack.name)))

    def _places(self) -> tuple[PlaceUsage, ...]:
        sizes: dict[str, list[int]] = {}
        for pack, url in self._view.locations().items():
            size_bytes = self._sizes.get(ObjectKey("pack", pack).name)
            if size_bytes is not None:
                sizes.setdefault(url, []).append(size_bytes)
        return tuple(PlaceUsage(url=url, packs=len(packs), bytes=sum(packs)) for url, packs in sorted(sizes.items()))

    def _codecs(self) -> tuple[CodecUsage, ...]:
        rows = sorted(self._sums.codecs.items(), key=lambda row: -row[1][1])
        return tuple(
            CodecUsage(codec=codec_name(codec), blocks=blocks, raw_bytes=raw, stored_bytes=stored) for codec, (blocks, raw, stored) in rows
        )

    def _snapshots(self) -> Iterator[SnapshotUsage]:
        for ulid, number in self._number.items():
            info = self._view.snapshot(ulid)
            if info is not None:
                stored, exclusive = int(self._owners.stored_bytes[number]), int(self._owners.exclusive_bytes[number])
                yield SnapshotUsage(
                    id=ulid_text(ulid),
                    root=info.root.hex(),
                    ref=info.ref,
                    step=info.step,
                    held_by=tuple(self._held[ulid]),
                    logical_bytes=info.logical_bytes,
                    stored_bytes=stored,
                    shared_bytes=stored - exclusive,
                    exclusive_bytes=exclusive,
                )


class UsageCosts(NamedTuple):
    """USD a month."""

    locations: Mapping[str, float]
    refs: Mapping[str, float]
    """Each stored byte costs the mean of all locations: the locations of a ref's blocks are not looked up."""
    jobs: Mapping[str, float]

    @property
    def total(self) -> float:
        """The costs of the whole store."""
        return sum(self.locations.values())


def usage_costs(usage: Usage, prices: Prices) -> UsageCosts | None:
    """The costs; None without prices, or if a location that holds bytes has none."""
    total = prices.usd_per_month(usage.by_location) if prices.by_name else None
    if total is None:
        return None
    each = total / max(1, usage.objects_bytes)
    return UsageCosts(
        locations={url: prices.usd_per_month({url: size}) or 0.0 for url, size in usage.by_location.items()},
        refs={ref.ref: ref.stored_bytes * each for ref in usage.refs},
        jobs={job.job: job.stored_bytes * each for job in usage.jobs},
    )
