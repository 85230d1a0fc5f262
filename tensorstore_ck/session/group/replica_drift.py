"""Watches replicas for drift: at each save every rank also hashes what another one writes of what both hold, in rotation.

So two ranks tell of every block what it is, and after n - 1 puts each of n replicas has been looked at in full. One that differs keeps
its own copy, in a snapshot of its own beside the one that all put together. Knows no torch.
"""

import warnings
from collections.abc import Sequence
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Digest, block_id, derived_hash
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import ByteSource, CapturedState
from tensorstore_ck.engine.write.part_writer import PartSlot, source_offsets
from tensorstore_ck.engine.write.publish import ANY
from tensorstore_ck.engine.write.put import put
from tensorstore_ck.engine.write.request import PutRequest
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.block_assignment import Region, regions, shares
from tensorstore_ck.format.layout import Layout, TensorSpec
from tensorstore_ck.format.part import Part
from tensorstore_ck.format.part_index import PartIndex
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.format.values import encode as encode_value
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.session.group.replica_check import DIGEST_BYTES, MAX_NAMED, set_key

MARK: Final = "drift"


class ReplicaHashes(NamedTuple):
    """What a rank tells of what it holds with others."""

    written: dict[bytes, bytes]
    """Set of replicas -> digest of what this rank wrote of it."""
    seen: list[tuple[int, bytes, bytes]]
    """(who wrote it, set of replicas, digest of what this rank has in its place)."""

    def record(self) -> Body:
        """As other ranks read it."""
        return {"written": [[*pair] for pair in sorted(self.written.items())], "seen": [[*each] for each in self.seen]}

    @classmethod
    def of_record(cls, record: Body) -> "ReplicaHashes":
        """What `record` made."""
        seen = [(int(rank), bytes(key), bytes(digest)) for rank, key, digest in take(record, "seen", list)]
        return cls({bytes(key): bytes(digest) for key, digest in take(record, "written", list)}, seen)


class _Held(NamedTuple):
    """A region that others hold as well."""

    region: Region
    start: int
    """Where it begins in its tensor's source."""


class _Run(NamedTuple):
    """Blocks that one thread hashes."""

    held: _Held
    first: int
    """Where the first one begins in the region."""
    lengths: list[int]


def watched(replicas: Sequence[int], rank: int, turn: int) -> int:
    """Whose writing `rank` looks at in the turn-th put."""
    return replicas[(replicas.index(rank) - 1 - turn % (len(replicas) - 1)) % len(replicas)]


def hash_replicas(captured: CapturedState, slot: PartSlot, part: Part, block_bytes: int, turn: int) -> ReplicaHashes:
    """Tells what this rank wrote, by the ids of its part; and hashes what it holds of what another one writes."""
    sets = _sets(captured, slot)
    plan = PartIndex(captured.layout, part, slot.layout_ranks, block_bytes, "the part of this rank")
    written = {}
    for replicas, several in sets.items():
        ids = [each for held in several for each in _stored_ids(part, plan, held.region)[1]]
        if ids:
            written[set_key(replicas)] = _digest(ids)
    seen = []
    for replicas, several in sets.items():
        owner = watched(replicas, slot.rank, turn)
        runs = _runs(captured.layout, several, owner, block_bytes)
        if runs:
            seen.append((owner, set_key(replicas), _digest([each for ids in _hash(captured, runs) for each in ids])))
    return ReplicaHashes(written, seen)


def drifted(said: Sequence[ReplicaHashes | None]) -> list[tuple[int, int]]:
    """(rank, who wrote what it has in another way), for each that has."""
    found = set()
    for rank, replica_hashes in enumerate(said):
        for owner, key, digest in replica_hashes.seen if replica_hashes is not None else ():
            other = said[owner] if 0 <= owner < len(said) else None
            if other is not None and other.written.get(key) != digest:
                found.add((rank, owner))
    return sorted(found)


def copy_ref(ref: str, rank: int) -> str:
    """The branch that keeps what a rank had in another way."""
    return f"drift/{ref}/rank-{rank}"


def keep_copy(engine: Engine, captured: CapturedState, slot: PartSlot, info: SnapshotInfo, owner: int) -> None:
    """Puts what this rank has in another way than `owner`, who wrote it; warns of it, and of what prevents it."""
    try:
        found = _differing(engine, captured, slot, info, owner)
        request = _request(engine, info, slot.rank, owner)
        put(engine, _cut_out(captured, found), request)
        kept = f"its own are kept at {request.ref!r}"
    except StoreError as exc:
        found, kept = [], f"its own could not be kept: {exc}"
    names = list(dict.fromkeys(captured.layout.tensors[held.region.tensor].name for held in found))
    shown = ", ".join(map(repr, names[:MAX_NAMED])) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
    warnings.warn(
        f"rank {slot.rank} no longer has the values of rank {owner}{' in ' + shown if names else ''}, which both should hold alike: the "
        f"snapshot has those of rank {owner}, and {kept}. Look for operations that are not deterministic, and for failing hardware",
        stacklevel=2,
    )


def _sets(captured: CapturedState, slot: PartSlot) -> dict[tuple[int, ...], list[_Held]]:
    held = regions(captured.layout, slot.rank, slot.layout_ranks, captured.explicit)
    sets: dict[tuple[int, ...], list[_Held]] = {}
    for region, start in zip(held, source_offsets(captured, held), strict=True):
        if len(region.replicas) > 1:
            sets.setdefault(region.replicas, []).append(_Held(region, start))
    return sets


def _runs(layout: Layout, several: Sequence[_Held], writer: int, block_bytes: int) -> list[_Run]:
    """What a rank writes of the regions of one set."""
    written = shares(layout, [held.region for held in several], writer, block_bytes)
    return [_Run(several[share.region], share.start, share.lengths) for share in written]


def _hash(captured: CapturedState, runs: Sequence[_Run]) -> list[list[Digest]]:
    """The ids of the blocks as this rank has them."""
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
    """What a part has of a region: where that begins, and the ids of its blocks."""
    held = plan.of_region(region)
    if held is None:
        return 0, []
    if held.is_inline:
        return held.start, [block_id(memoryview(part.inline)[held.first : held.first + held.lengths[0]])]
    return held.start, [part.block_id(row) for row in held.rows]


def _differing(engine: Engine, captured: CapturedState, slot: PartSlot, info: SnapshotInfo, owner: int) -> list[_Held]:
    """The regions of which the owner wrote something else."""
    part = engine.read_part(engine.read_record(info), owner)
    block_bytes = engine.config.block_bytes
    plan = PartIndex(captured.layout, part, slot.layout_ranks, block_bytes, f"the part of rank {owner}")
    found = []
    for replicas, several in _sets(captured, slot).items():
        runs = _runs(captured.layout, several, owner, block_bytes) if owner in replicas else []
        for run, ids in zip(runs, _hash(captured, runs), strict=True):
            if _stored_ids(part, plan, run.held.region) != (run.first, ids):
                found.append(run.held)
    return found


def _request(engine: Engine, info: SnapshotInfo, rank: int, owner: int) -> PutRequest:
    ref = copy_ref(info.ref, rank)
    engine.log.sync()
    branch = engine.log.view().branch(ref)
    metadata = encode_metadata({"drift": {"snapshot": info.root.hex(), "written_by_rank": owner, "rank": rank}})
    return PutRequest(ref, info.step, branch.root if branch is not None else None, ANY, metadata, {})


def _cut_out(captured: CapturedState, found: Sequence[_Held]) -> CapturedState:
    """A state of some regions, each a tensor; one that is not the whole tensor has its place in its name."""
    tensors, sources = [], list[ByteSource]()
    for held in found:
        region, spec = held.region, captured.layout.tensors[held.region.tensor]
        place = ", ".join(f"{offset}:{offset + size}" for offset, size in zip(region.offsets, region.sizes, strict=True))
        name = spec.name if region.sizes == spec.shape and not region.is_flat else f"{spec.name}[{place}]"
        tensors.append(TensorSpec(name, spec.dtype, spec.item_bytes, region.sizes))
        sources.append(_From(captured.sources[region.tensor], held.start))
    tree = ["d", [encode_value(spec.name, spec.name) for spec in tensors], list(range(len(tensors)))]
    return CapturedState(Layout(tensors, tree), (), (), sources)


class _From:
    """`ByteSource` of what begins somewhere in another one."""

    def __init__(self, source: ByteSource, start: int) -> None:
        self._source = source
        self._start = start

    @property
    def size_bytes(self) -> int:
        """All that is left of it."""
        return self._source.size_bytes - self._start

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes of it."""
        return self._source.read(self._start + start, self._start + stop)


def warn_of_drift(pairs: Sequence[tuple[int, int]], info: SnapshotInfo) -> None:
    """Warns whoever looks at the first rank; those that differ warn themselves, see `keep_copy`."""
    step = "" if info.step is None else f" of step {info.step}"
    warnings.warn(
        f"the snapshot{step} on {info.ref!r} is marked drift: {reason(pairs, info.ref)}. What replicas hold alike they no longer do: "
        "training may go on with a corrupted rank. Look for operations that are not deterministic, and for failing hardware",
        stacklevel=2,
    )


def reason(pairs: Sequence[tuple[int, int]], ref: str) -> str:
    """For people who see the mark."""
    rank, owner = pairs[0]
    others = f", and {len(pairs) - 1} more ranks than those that wrote" if len(pairs) > 1 else ""
    return f"rank {rank} had other values than rank {owner} of what both hold{others}; its own are at {copy_ref(ref, rank)}"
