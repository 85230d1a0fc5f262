"""The kinds of ranks in a save: ranks with one layout are of one kind, such as the stages of a pipeline. Knows no torch.

Before anything is written, the first rank of each kind reports its layout and values to rank 0, which plans the save: see `save_plan`.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tensorstore_ck.common.ids import block_id
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.block_assignment import MIN_RUN_BYTES, regions_of_tensor
from tensorstore_ck.format.layout import ExplicitRegions, Layout, decode_layout
from tensorstore_ck.format.merge_layout_parts import LayoutConflictError, MergedLayout
from tensorstore_ck.format.sealed import MAX_BODY_BYTES, pack_body, take, unpack_body
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.session.group.rank_messages import named_ranks
from tensorstore_ck.session.group.region_claims import uncovered

MAX_SHARE_TWICE: Final = 1 / 10
"""The share of a save's bytes that several kinds of ranks may each store, although these bytes are the same."""
_ZIP_LEVEL: Final = 1

ReportedBoxes = Mapping[int, Sequence[ExplicitRegions]]
"""Rank -> its regions of tensors whose regions do not follow from its layout."""


class RankKind(NamedTuple):
    """The state that the ranks with one layout save: a `merge_layout_parts.LayoutPart`."""

    ranks: tuple[int, ...]
    layout: Layout
    values: Sequence[Any]
    blobs: Mapping[int, bytes]
    """The large values, as far as they were reported."""
    blob_ids: Sequence[bytes]
    """The ids of all large values."""

    @property
    def name(self) -> str:
        """For messages."""
        return named_ranks(self.ranks)

    def blob(self, index: int) -> bytes:
        """The id of a large value, which is equal for equal values."""
        return self.blob_ids[index]


def zip_body(body: Mapping[str, object]) -> bytes:
    """A message of many bytes to other ranks."""
    return zlib.compress(pack_body(body), _ZIP_LEVEL)


def unzip_body(data: bytes, name: str) -> Any:
    """Decodes the result of `zip_body`. Decompresses no more bytes than a body may have.

    Raises:
        CorruptObjectError, zlib.error: it is not that.
    """
    return unpack_body(memoryview(zlib.decompressobj().decompress(data, MAX_BODY_BYTES + 1)), name)


def encode_kind(captured: CapturedState, *, with_layout: bool, known_blobs: bytes) -> bytes:
    """A rank's report on its kind. `known_blobs`: the ids of large values that rank 0 has itself."""
    ids = [bytes(block_id(blob)) for blob in captured.blobs]
    known = {known_blobs[at : at + 32] for at in range(0, len(known_blobs), 32)}
    blobs = [[number, bytes(captured.blobs[number])] for number, blob in enumerate(ids) if blob not in known]
    layout = captured.layout.encoded if with_layout else b""
    return zip_body({"layout": layout, "values": list(captured.values), "blob_ids": ids, "blobs": blobs})


def decode_kind(data: bytes, ranks: tuple[int, ...], layout: Layout | None) -> RankKind:
    """The kind that `encode_kind` encoded. `layout`: its layout, if that is known.

    Raises:
        CorruptObjectError: it is not that.
    """
    name = f"the report of rank {ranks[0]}"
    try:
        body = unzip_body(data, name)
        encoded = take(body, "layout", bytes)
        return RankKind(
            ranks=ranks,
            layout=decode_layout(encoded, name) if layout is None else layout,
            values=take(body, "values", list),
            blobs={int(number): bytes(blob) for number, blob in take(body, "blobs", list)},
            blob_ids=[bytes(blob_id) for blob_id in take(body, "blob_ids", list)],
        )
    except (TypeError, ValueError, zlib.error) as exc:
        raise CorruptObjectError(f"{name} is malformed: {exc}", object_id=name) from exc


def can_stay_apart(kinds: Sequence[RankKind], reported: ReportedBoxes) -> bool:
    """Whether each kind can have its own layout in the snapshot without many bytes being stored twice.

    True if no tensor is spread over ranks of several kinds, and tensors that several kinds have are the same to them.
    """
    for kind in kinds:
        own = set(kind.ranks)
        if not all(own.issuperset(mesh.ranks) for mesh in kind.layout.meshes):
            return False
        if uncovered(kind.layout, {rank: reported.get(rank, ()) for rank in kind.ranks}):
            return False
    try:
        merged = MergedLayout(kinds)
    except LayoutConflictError:
        return False
    if merged.numbered_tensors or merged.value_conflicts:
        return False
    twice = 0
    for places in merged.shared_tensors.values():
        if len({_cut(kinds[side], number, reported) for side, number in places}) > 1:
            return False
        side, number = places[0]
        twice += (len(places) - 1) * kinds[side].layout.tensors[number].size_bytes
    once = sum(spec.size_bytes for spec in merged.layout.tensors)
    return twice <= max(MIN_RUN_BYTES, once * MAX_SHARE_TWICE)


def _cut(kind: RankKind, tensor: int, reported: ReportedBoxes) -> frozenset[tuple[bool, tuple[int, ...], tuple[int, ...]]]:

    def boxes_of(rank: int, tensor: int) -> Sequence[BoxBounds]:
        return next((regions.boxes for regions in reported.get(rank, ()) if regions.tensor == tensor), ())

    cut = regions_of_tensor(kind.layout, tensor, kind.ranks, boxes_of)
    return frozenset((regions.is_flat, regions.offsets, regions.sizes) for regions in cut)
