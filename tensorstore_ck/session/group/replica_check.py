"""Checks that replicas are equal: each rank hashes all data that it shares with others, and rank 0 compares a few bytes.

Which ranks hold the same region follows from the layout, so a rank reports one digest for each set of replicas that it belongs to, and a
checksum for each run of tensors, which names the tensors when a digest differs. Knows no torch.
"""

from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import block_id, derived_hash
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.common.units import listed
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.write_plan import PartAuthor
from tensorstore_ck.format.block_assignment import regions_of_rank
from tensorstore_ck.format.layout import Layout
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.session.group.duplicate_regions import RegionSum, ReportedRegions, contradicting
from tensorstore_ck.session.group.rank_messages import named_ranks

MAX_BUCKETS: Final = 1 << 16
"""The approximate number of checksums that all ranks report together. With them rank 0 names the tensors that differ."""
MIN_BUCKETS: Final = 16
CHECKSUM_BYTES: Final = 4
DIGEST_BYTES: Final = 16
MAX_NAMED: Final = 4
DIFFERENT: Final = (
    "do tensors of expert, tensor or pipeline parallelism have one name on several ranks? Make them DTensors, or give them names of their "
    "own. Or are they buffers that each rank updates, as batch norm does under DDP? Pass those in rank_state=, or broadcast them first"
)


class ReplicaDigests(NamedTuple):
    """A rank's report on the data that it shares with others."""

    sets: dict[bytes, bytes]
    """Set of replicas -> the digest of all data that they share."""
    checksums: bytes
    """The checksum of each bucket of tensors."""
    sums: Sequence[RegionSum] = ()
    """The sums of tensors that ranks hold in several ways."""

    def record(self) -> Body:
        """The record that other ranks read."""
        return {
            "sets": [[*pair] for pair in sorted(self.sets.items())],
            "checksums": self.checksums,
            "sums": [[*region_sum] for region_sum in self.sums],
        }

    @classmethod
    def of_record(cls, record: Body) -> "ReplicaDigests":
        """The digests that `record` encoded."""
        sets = {bytes(key): bytes(digest) for key, digest in take(record, "sets", list)}
        return cls(sets, take(record, "checksums", bytes), [RegionSum(*map(int, fields)) for fields in take(record, "sums", list)])


def digests_of(
    captured: CapturedState, author: PartAuthor, block_bytes: int, reported: Sequence[ReportedRegions] = (), *, only_reported: bool = False
) -> ReplicaDigests:
    """Hashes all data that this rank shares with others, block by block. `reported` was hashed already."""
    tensors = captured.layout.tensors
    held = [] if only_reported else regions_of_rank(captured.layout, author.rank, author.layout_ranks, captured.explicit)
    digests: dict[int, bytes] = {}
    ends: dict[int, int] = {}
    tasks: list[tuple[int, int, list[int]]] = []
    for number, region in enumerate(held):
        spec = tensors[region.tensor]
        base = ends.get(region.tensor, 0)
        ends[region.tensor] = base + region.size_bytes(spec)
        if len(region.replicas) > 1:
            tasks.append((number, base, region.block_lengths(spec, block_bytes)))

    def digest(task: tuple[int, int, list[int]]) -> None:
        number, start, lengths = task
        ids = []
        for length in lengths:
            ids.append(block_id(captured.sources[held[number].tensor].read(start, start + length)))
            start += length
        digests[number] = derived_hash("region of a replica", *ids)

    for_each(tasks, digest, cpu_threads())
    of_sets: dict[bytes, list[bytes]] = {}
    key_of = cache(set_key)
    buckets = [0] * bucket_count(captured.layout, author.world_size)
    for number in sorted(digests):
        region = held[number]
        of_sets.setdefault(key_of(region.replicas), []).append(digests[number])
        buckets[bucket_of(region.tensor, captured.layout, author.world_size)] ^= int.from_bytes(digests[number][:CHECKSUM_BYTES], "little")
    for key, tensor, hashed in reported:
        of_sets.setdefault(key, []).append(hashed)
        buckets[bucket_of(tensor, captured.layout, author.world_size)] ^= int.from_bytes(hashed[:CHECKSUM_BYTES], "little")
    sets = {key: bytes(derived_hash("set of replicas", *several)[:DIGEST_BYTES]) for key, several in of_sets.items()}
    if not sets:
        return ReplicaDigests({}, b"")
    return ReplicaDigests(sets, b"".join(bucket.to_bytes(CHECKSUM_BYTES, "little") for bucket in buckets))


def differences(reports: Sequence[ReplicaDigests], layouts: Sequence[Layout | None]) -> str:
    """The tensors that differ between replicas, and the ranks, as text; empty if none do. `layouts`: the known ones."""
    first: dict[bytes, int] = {}
    for rank, digests in enumerate(reports):
        for key, digest in digests.sets.items():
            other = first.setdefault(key, rank)
            if reports[other].sets[key] != digest:
                return _explain(layouts[other], reports, key, other)
    tensor = contradicting([region_sum for digests in reports for region_sum in digests.sums])
    if tensor is None:
        return ""
    ranks = [rank for rank, digests in enumerate(reports) if any(region_sum.tensor == tensor for region_sum in digests.sums)]
    layout = layouts[ranks[0]]
    name = repr(layout.tensors[tensor].name) if layout is not None else "a tensor"
    return f"{name} is not the same on all of {named_ranks(ranks)}, which hold it in different ways, each in full: {DIFFERENT}"


def _explain(layout: Layout | None, reports: Sequence[ReplicaDigests], key: bytes, first: int) -> str:
    expected = reports[first]
    others = [rank for rank, digests in enumerate(reports) if digests.sets.get(key, expected.sets[key]) != expected.sets[key]]
    mine, theirs = expected.checksums, reports[others[0]].checksums
    size = CHECKSUM_BYTES
    wrong = {at // size for at in range(0, min(len(mine), len(theirs)), size) if mine[at : at + size] != theirs[at : at + size]}
    tensors = enumerate(layout.tensors) if layout is not None else ()
    names = [repr(spec.name) for number, spec in tensors if layout is not None and bucket_of(number, layout, len(reports)) in wrong]
    return (
        f"tensors that should be equal on all ranks that hold them are not: rank {first} and {named_ranks(others)} differ in "
        f"{listed(names, MAX_NAMED) or 'some tensor'}; {DIFFERENT}"
    )


def bucket_count(layout: Layout, ranks: int) -> int:
    """The number of checksums that a rank reports."""
    return min(len(layout.tensors), MAX_BUCKETS // ranks + MIN_BUCKETS)


def bucket_of(tensor: int, layout: Layout, ranks: int) -> int:
    """The bucket of a tensor."""
    return tensor * bucket_count(layout, ranks) // len(layout.tensors)


def set_key(replicas: tuple[int, ...]) -> bytes:
    """Names a set of replicas among ranks."""
    return bytes(derived_hash("ranks of a set", b"".join(rank.to_bytes(4, "little") for rank in replicas))[:8])
