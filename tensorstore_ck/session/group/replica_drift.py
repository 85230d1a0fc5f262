"""Checks replicas for drift: at each save every rank also hashes data that another rank writes and both hold, in rotation.

So two ranks report a hash of every block, and after n - 1 saves each of n replicas was compared in full. A rank that differs keeps its own
values in a separate snapshot. Knows no torch.
"""

import warnings
from collections.abc import Sequence
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Digest, block_id, derived_hash
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.common.units import listed
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import ByteSource, CapturedState, ListedSources
from tensorstore_ck.engine.write.request import ANY, SaveRequest
from tensorstore_ck.engine.write.write_and_commit import save_captured
from tensorstore_ck.engine.write.write_plan import PartAuthor, source_offsets
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.block_assignment import Region, assign_blocks, regions_of_rank
from tensorstore_ck.format.layout import Layout, TensorSpec
from tensorstore_ck.format.part import Part
from tensorstore_ck.format.part_index import PartIndex
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.format.values import encode as encode_value
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.session.group.planned_state import SourcePieces
from tensorstore_ck.session.group.replica_check import DIGEST_BYTES, MAX_NAMED, set_key

MARK: Final = "drift"


class ReplicaHashes(NamedTuple):
    """A rank's report on the data that it shares with others."""

    written: dict[bytes, bytes]
    """Set of replicas -> the digest of the bytes that this rank wrote of it."""
    seen: list[tuple[int, bytes, bytes]]
    """(rank that wrote it, set of replicas, digest of this rank's values)."""

    def record(self) -> Body:
        """The record that other ranks read."""
        return {"written": [[*pair] for pair in sorted(self.written.items())], "seen": [[*digest] for digest in self.seen]}

    @classmethod
    def of_record(cls, record: Body) -> "ReplicaHashes":
        """The hashes that `record` encoded."""
        seen = [(int(rank), bytes(key), bytes(digest)) for rank, key, digest in take(record, "seen", list)]
        return cls({bytes(key): bytes(digest) for key, digest in take(record, "written", list)}, seen)


class _Held(NamedTuple):
    """A region that other ranks hold too."""

    region: Region
    start: int
    """The start of the region in its tensor's source."""


class _Run(NamedTuple):
    """Blocks that one thread hashes."""

    held: _Held
    first: int
    """The start of the first block in the region."""
    lengths: list[int]


def watched(replicas: Sequence[int], rank: int, turn: int) -> int:
    """The rank whose data `rank` compares at the turn-th save."""
    return replicas[(replicas.index(rank) - 1 - turn % (len(replicas) - 1)) % len(replicas)]


def hash_replicas(captured: CapturedState, author: PartAuthor, part: Part, block_bytes: int, turn: int) -> ReplicaHashes:
    """The hashes of the data that this rank wrote, from its part, and of its own values of data that another rank writes."""
    sets = _sets(captured, author)
    name = "the part of this rank"
    plan = PartIndex(layout=captured.layout, part=part, layout_ranks=author.layout_ranks, block_bytes=block_bytes, name=name)
    written = {}
    for replicas, several in sets.items():
        ids = [block_id for held in several for block_id in _stored_ids(part, plan, held.region)[1]]
        if ids:
            written[set_key(replicas)] = _digest(ids)
    seen = []
    for replicas, several in sets.items():
        owner = watched(replicas, author.rank, turn)
        runs = _runs(captured.layout, several, owner, block_bytes)
        if runs:
            seen.append((owner, set_key(replicas), _digest([block_id for ids in _hash(captured, runs) for block_id in ids])))
    return ReplicaHashes(written, seen)


def drifted(reports: Sequence[ReplicaHashes | None]) -> list[tuple[int, int]]:
    """(rank, rank that wrote other values), for each rank that differs."""
    pairs = set()
    for rank, replica_hashes in enumerate(reports):
        for owner, key, digest in replica_hashes.seen if replica_hashes is not None else ():
            other = reports[owner] if 0 <= owner < len(reports) else None
            if other is not None and other.written.get(key) != digest:
                pairs.add((rank, owner))
    return sorted(pairs)


def copy_ref(ref: str, rank: int) -> str:
    """The branch that keeps the values of a rank that differs."""
    return f"drift/{ref}/rank-{rank}"


def keep_copy(engine: Engine, captured: CapturedState, author: PartAuthor, info: SnapshotRow, owner: int) -> None:
    """Saves the values of this rank that differ from those that `owner` wrote; warns, also if that fails."""
    try:
        differing = _differing(engine, captured=captured, author=author, info=info, owner=owner)
        request = _request(engine, info, author.rank, owner)
        save_captured(engine, _cut_out(captured, differing), request)
        kept = f"its own are kept at {request.ref!r}"
    except StoreError as exc:
        differing, kept = [], f"its own could not be kept: {exc}"
    names = list(dict.fromkeys(repr(captured.layout.tensors[held.region.tensor].name) for held in differing))
    where = f" in {listed(names, MAX_NAMED)}" if names else ""
    warnings.warn(
        f"rank {author.rank} no longer has the values of rank {owner}{where}, which should be equal: the "
        f"snapshot has those of rank {owner}, and {kept}. Look for operations that are not deterministic, and for failing hardware",
        stacklevel=user_stacklevel(),
    )


def _sets(captured: CapturedState, author: PartAuthor) -> dict[tuple[int, ...], list[_Held]]:
    held = regions_of_rank(captured.layout, author.rank, author.layout_ranks, captured.explicit)
    sets: dict[tuple[int, ...], list[_Held]] = {}
    for region, start in zip(held, source_offsets(captured, held), strict=True):
        if len(region.replicas) > 1:
            sets.setdefault(region.replicas, []).append(_Held(region, start))
    return sets


def _runs(layout: Layout, several: Sequence[_Held], writer: int, block_bytes: int) -> list[_Run]:
    written = assign_blocks(layout, [held.region for held in several], writer, block_bytes)
    return [_Run(several[share.region], share.start, share.lengths) for share in written]


def _hash(captured: CapturedState, runs: Sequence[_Run]) -> list[list[Digest]]:
    ids: list[list[Digest]] = [[] for _ in runs]

    def work(number: int) -> None:
        held, first, lengths = runs[number]
        at = held.start + first
        for length in lengths:
            ids[number].append(block_id(captured.sources[held.region.tensor].read(at, at + length)))
            at += length

    for_each(range(len(runs)), work, cpu_threads())
    return ids


def _digest(ids: Sequence[Digest]) -> bytes:
    return bytes(derived_hash("what a rank wrote of a set", *ids)[:DIGEST_BYTES])


def _stored_ids(part: Part, plan: PartIndex, region: Region) -> tuple[int, list[Digest]]:
    """Where a part's share of a region begins, and the ids of its blocks."""
    held = plan.of_region(region)
    if held is None:
        return 0, []
    if held.is_inline:
        return held.start, [block_id(memoryview(part.inline)[held.first : held.first + held.lengths[0]])]
    return held.start, [part.block_id(row) for row in held.rows]


def _differing(engine: Engine, captured: CapturedState, author: PartAuthor, info: SnapshotRow, owner: int) -> list[_Held]:
    """The regions for which the owner wrote other values."""
    part, block_bytes = engine.read_part(engine.read_record(info), owner), engine.config.block_bytes
    name = f"the part of rank {owner}"
    plan = PartIndex(layout=captured.layout, part=part, layout_ranks=author.layout_ranks, block_bytes=block_bytes, name=name)
    differing = []
    for replicas, several in _sets(captured, author).items():
        runs = _runs(captured.layout, several, owner, block_bytes) if owner in replicas else []
        for run, ids in zip(runs, _hash(captured, runs), strict=True):
            if _stored_ids(part, plan, run.held.region) != (run.first, ids):
                differing.append(run.held)
    return differing


def _request(engine: Engine, info: SnapshotRow, rank: int, owner: int) -> SaveRequest:
    ref = copy_ref(info.ref, rank)
    engine.log.sync()
    branch = engine.log.view().branch(ref)
    parent = branch.root if branch is not None else None
    metadata = encode_metadata({"drift": {"snapshot": info.root.hex(), "written_by_rank": owner, "rank": rank}})
    return SaveRequest(ref=ref, step=info.step, parent=parent, expect=ANY, metadata=metadata, metrics={}, nearest=parent)


def _cut_out(captured: CapturedState, found: Sequence[_Held]) -> CapturedState:
    """A state of some regions, each as a tensor; a part of a tensor has its position in its name."""
    tensors, sources = [], list[ByteSource]()
    for held in found:
        region, spec = held.region, captured.layout.tensors[held.region.tensor]
        place = ", ".join(f"{offset}:{offset + size}" for offset, size in zip(region.offsets, region.sizes, strict=True))
        name = spec.name if region.sizes == spec.shape and not region.is_flat else f"{spec.name}[{place}]"
        tensors.append(TensorSpec(name, spec.dtype, spec.item_bytes, region.sizes))
        source = captured.sources[region.tensor]
        sources.append(SourcePieces([(source, held.start, source.size_bytes - held.start)]))
    tree = ["d", [encode_value(spec.name, spec.name) for spec in tensors], list(range(len(tensors)))]
    return CapturedState(Layout(tensors, tree), (), (), ListedSources(sources))


def warn_of_drift(pairs: Sequence[tuple[int, int]], info: SnapshotRow) -> None:
    """Warns on the first rank; ranks that differ warn themselves, see `keep_copy`."""
    step = "" if info.step is None else f" of step {info.step}"
    warnings.warn(
        f"the snapshot{step} on {info.ref!r} is marked drift: {reason(pairs, info.ref)}. Replicas that should be equal are not: "
        "training may go on with a corrupted rank. Look for operations that are not deterministic, and for failing hardware",
        stacklevel=user_stacklevel(),
    )


def reason(pairs: Sequence[tuple[int, int]], ref: str) -> str:
    """The reason of the mark, for people."""
    rank, owner = pairs[0]
    others = f", and {len(pairs) - 1} more ranks than those that wrote" if len(pairs) > 1 else ""
    return f"rank {rank} had other values than rank {owner} of the same data{others}; its own are at {copy_ref(ref, rank)}"
