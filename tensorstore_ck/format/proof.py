"""Proofs: one tensor belongs to a root, shown without the other tensors. Pure. Format: FORMAT.md, "Proofs".

From the root to the bytes: the root hashes the ids of the parts; a part id hashes the layout id, sizes, block ids and small tensors; the
layout has names, dtypes and shapes, and determines, with the sizes, which block ids are the tensor's. A proof has the layout, and of the
byte strings that root and part ids hash the chunks with what is needed (`blake3_tree`). Everything in it is hostile until `Proof.root` and
then the ids of the parts are compared: until then, work is in proportion to the file; after that, to what the snapshot itself would cost.
"""

import struct
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, block_id
from tensorstore_ck.common.signing_keys import PUBLIC_KEY_BYTES, SIGNATURE_BYTES
from tensorstore_ck.errors import CorruptObjectError, MismatchError
from tensorstore_ck.format.blake3_tree import Slice, take_slice
from tensorstore_ck.format.block_assignment import decode_regions, ranks_with_layout, regions_of_rank, writers_of
from tensorstore_ck.format.layout import MAX_ITEM_BYTES, MAX_NAME_BYTES, Layout, TensorSpec, decode_layout, layout_id
from tensorstore_ck.format.part import BLOB_DTYPE, GROUP_HEADER, PART_HEADER, Part, group_problem
from tensorstore_ck.format.part_index import HeldRegions, RegionBytes
from tensorstore_ck.format.record import MAX_STEP, ROOT_HEADER, Record
from tensorstore_ck.format.ref_statement import LogName, RefStatement, SignedRef
from tensorstore_ck.format.sealed import ParseBudget, seal, take, take_count, unseal
from tensorstore_ck.format.sharding import BoxBounds, tiles

NAME: Final = "the proof"
_ADVICE: Final = "it was damaged or forged: ask for another one"


class ProvenBlock(NamedTuple):
    """Some bytes of a tensor: their block id, or the bytes themselves, where the part has them inline."""

    boxes: tuple[BoxBounds, ...]
    size_bytes: int
    content: bytes
    is_inline: bool


class ProvenTensor(NamedTuple):
    """A tensor of the snapshot with the root of the proof."""

    name: str
    spec: TensorSpec
    blocks: Sequence[ProvenBlock]

    def require_data(self, data: Buffer) -> None:
        """Raises `MismatchError` unless `data`, row-major, is what the tensor has."""
        view, spec = memoryview(data), self.spec
        if view.nbytes != spec.size_bytes:
            raise MismatchError(f"the data has {view.nbytes:,} bytes, and {self.name!r} has {spec.size_bytes:,}", object_id=self.name)
        array = np.frombuffer(view, f"V{spec.item_bytes}").reshape(spec.shape)
        for block in self.blocks:
            cut = (tuple(slice(at, at + size) for at, size in zip(*box, strict=True)) for box in block.boxes)
            found = b"".join(array[where].tobytes() for where in cut)
            if (found if block.is_inline else block_id(found)) != block.content:
                raise MismatchError(
                    f"the data is not that of {self.name!r}: {block.size_bytes:,} bytes at {block.boxes[0].offsets} differ",
                    object_id=self.name,
                )


class Proof(NamedTuple):
    """A decoded proof, of which nothing was verified yet."""

    block_bytes: int
    """The store's target size. No hash covers it. But hashes cover the numbers of blocks, and those of all parts that may have some of the
    tensor do not fit another cut of it."""
    tensor: int
    """The tensor's number in the layout."""
    layout: bytes
    """The layout object."""
    record: Slice
    """Of what the root hashes."""
    parts: Sequence[Slice]
    """Of what the part ids hash, by rank: of all ranks to which a byte of the tensor is assigned, also those without a block."""
    signed: SignedRef | None = None
    """Of a branch or tag at the root."""

    def encode(self) -> bytes:
        """The sealed object."""
        signed = None if self.signed is None else [*self.signed.statement.of, *self.signed.statement[1:], *self.signed[1:]]
        parts = [list(part) for part in self.parts]
        body = {"block_bytes": self.block_bytes, "tensor": self.tensor, "layout": self.layout, "record": list(self.record)}
        return seal("proof", {**body, "parts": parts, "signed": signed})

    def root(self) -> Digest:
        """The root that the proof leads to. Raises `CorruptObjectError` if its slices contradict themselves."""
        return self.record.hash("root", NAME)

    def step(self) -> int | None:
        """The step of the snapshot."""
        return self._record_header()[1]

    def verify(self) -> ProvenTensor:
        """The tensor, once the caller has compared `root`.

        Raises:
            CorruptObjectError: the proof does not show that the tensor belongs to the root.
        """
        ranks, opened = self._record_header()[0], [_OpenPart(part) for part in self.parts]
        first = opened[0]
        for before, part in zip([None, *opened], opened, strict=False):
            at = ROOT_HEADER.size + DIGEST_BYTES * part.rank
            is_of_root = part.rank < ranks and self.record.read(at, at + DIGEST_BYTES, NAME) == part.id
            is_alike = (part.layout_id, part.world_size, part.layout_of) == (first.layout_id, first.world_size, first.layout_of)
            if not is_of_root or not is_alike or (before is not None and before.rank >= part.rank):
                raise _wrong(f"its part of rank {part.rank} is not of its snapshot, or not one of the tensor's")
        if ranks not in (first.world_size, 2 * first.world_size) or layout_id(self.layout) != first.layout_id:
            raise _wrong("its parts or its layout are not those of its snapshot")
        alike = (first.rank,) if first.layout_of is None else ranks_with_layout(first.layout_of, first.rank, first.world_size)
        found = {part.rank for part in opened}
        if not found.issubset(alike):
            raise _wrong("one of its parts is of a rank with another layout")
        budget = ParseBudget()
        budget.add_stored(len(self.layout))
        layout = decode_layout(self.layout, "the layout of the proof", budget)
        if self.tensor >= len(layout.tensors):
            raise _wrong(f"its layout has no tensor {self.tensor}")
        spec = layout.tensors[self.tensor]
        blocks = [block for part in opened for block in part.blocks(layout, self.tensor, alike, self.block_bytes)]
        _require_whole(spec, [box for block in blocks for box in block.boxes])
        if not all(part.writers(layout, self.tensor, alike) <= found for part in opened):
            raise _wrong(f"it lacks the part of a rank that may have blocks of {spec.name!r}")
        is_rank_state = first.rank >= first.world_size
        return ProvenTensor(f"rank_state[{first.rank - first.world_size}].{spec.name}" if is_rank_state else spec.name, spec, blocks)

    def _record_header(self) -> tuple[int, int | None]:
        """How many parts there are, and the step."""
        ids_bytes, has_step, step, has_parent, metadata_bytes = ROOT_HEADER.unpack(self.record.read(0, ROOT_HEADER.size, NAME))
        is_whole = self.record.size_bytes == ROOT_HEADER.size + ids_bytes + DIGEST_BYTES + metadata_bytes and ids_bytes % DIGEST_BYTES == 0
        if not is_whole or has_step > 1 or has_parent > 1 or (step and not has_step):
            raise _wrong("what its root hashes is no record")
        return ids_bytes // DIGEST_BYTES, step if has_step else None


def make_proof(
    record: Record,
    held: Sequence[tuple[Part, Sequence[RegionBytes]]],
    *,
    layout: bytes,
    tensor: int,
    block_bytes: int,
    signed: SignedRef | None,
) -> Proof:
    """The proof of a tensor. `held`: its bytes in each part that must be there (see `Proof.parts`), by rank; `layout`: the object."""
    at, slices = ROOT_HEADER.size, []
    for part, regions in held:
        pieces = part.logical_section()
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        ranges = [(0, ends[1]), (ends[4], ends[-1])]
        for each in regions:
            start = ends[3] + each.first if each.is_inline else ends[1] + DIGEST_BYTES * each.first
            ranges.append((start, start + (sum(each.lengths) if each.is_inline else DIGEST_BYTES * len(each.rows))))
        slices.append(take_slice("part", b"".join(pieces), ranges))
    ids = [(at + DIGEST_BYTES * part.rank, at + DIGEST_BYTES * (part.rank + 1)) for part, _ in held]
    return Proof(block_bytes, tensor, layout, take_slice("root", b"".join(record.logical_section()), [(0, at), *ids]), slices, signed)


def decode_proof(data: bytes) -> Proof:
    """Decodes a proof, and checks its form.

    Raises:
        CorruptObjectError: it is no proof.
        FormatVersionError: it has a newer version.
    """
    body = unseal("proof", data, NAME)
    try:
        proof = Proof(
            block_bytes=take_count(body, "block_bytes"),
            tensor=take_count(body, "tensor"),
            layout=take(body, "layout", bytes),
            record=_slice(body["record"]),
            parts=[_slice(item) for item in take(body, "parts", list)],
            signed=None if body["signed"] is None else _signed(take(body, "signed", list)),
        )
        if not 1 << 12 <= proof.block_bytes <= 1 << 26 or proof.block_bytes & (proof.block_bytes - 1) or not proof.parts:
            raise ValueError("it has no parts, or an impossible size of blocks")
        if proof.encode() != data:
            raise ValueError("it has more than a proof has, or another form")
    except (KeyError, TypeError, ValueError, struct.error) as exc:
        raise _wrong(f"it is no proof: {exc!r}") from exc
    return proof


class _OpenPart:
    """What the slice of a part shows."""

    def __init__(self, part: Slice) -> None:
        self._slice = part
        self.id = part.hash("part", NAME)
        header = PART_HEADER.unpack(part.read(0, PART_HEADER.size, NAME))
        self.layout_id, self.rank, self.world_size = Digest(header[0]), header[1], header[2]
        blobs_bytes, ids_bytes, values_bytes, self._inline_bytes = header[3:]
        self._ids_at = PART_HEADER.size + blobs_bytes
        self._inline_at = self._ids_at + ids_bytes + values_bytes
        self.layout_of, self._regions = self._group(self._inline_at + self._inline_bytes)
        if problem := group_problem(self.rank, self.world_size, self.layout_of, self._regions):
            raise _wrong(problem)
        if blobs_bytes % BLOB_DTYPE.itemsize or ids_bytes % DIGEST_BYTES:
            raise _wrong("a part has a truncated table")
        blobs = np.frombuffer(part.read(PART_HEADER.size, self._ids_at, NAME), BLOB_DTYPE)
        self._rows = range(int(blobs["blocks"].sum(dtype=np.int64)), ids_bytes // DIGEST_BYTES)

    def _group(self, at: int) -> tuple[bytes | None, bytes]:
        """Layout numbers and regions, which begin at byte `at` if it is a part of a group."""
        if at == self._slice.size_bytes:
            return None, b""
        start = at + GROUP_HEADER.size
        numbers_bytes, regions_bytes = GROUP_HEADER.unpack(self._slice.read(at, start, NAME))
        if start + numbers_bytes + regions_bytes != self._slice.size_bytes:
            raise _wrong("a part has another size than it says")
        middle = start + numbers_bytes
        return self._slice.read(start, middle, NAME), self._slice.read(middle, middle + regions_bytes, NAME)

    def writers(self, layout: Layout, tensor: int, layout_ranks: tuple[int, ...]) -> set[int]:
        """See `writers_of`: for the tensor's regions that the rank holds."""
        explicit = decode_regions(layout, self._regions, NAME)
        return writers_of(layout, regions_of_rank(layout, self.rank, layout_ranks, explicit), tensor)

    def blocks(self, layout: Layout, tensor: int, layout_ranks: tuple[int, ...], block_bytes: int) -> Iterator[ProvenBlock]:
        """The tensor's blocks in the part."""
        held = HeldRegions(
            layout,
            self.rank,
            layout_ranks,
            block_bytes,
            name=NAME,
            explicit=decode_regions(layout, self._regions, NAME),
            rows=self._rows,
            inline_bytes=self._inline_bytes,
            max_bytes=len(self._rows) * max(block_bytes, MAX_ITEM_BYTES),
        )
        item_bytes = layout.tensors[tensor].item_bytes
        for region in held.of(tensor):
            start = region.start
            at = self._inline_at + region.first if region.is_inline else self._ids_at + DIGEST_BYTES * region.first
            for length in region.lengths:
                pieces = region.region.pieces(layout.tensors[tensor], start // item_bytes, (start + length) // item_bytes)
                end = at + (length if region.is_inline else DIGEST_BYTES)
                yield ProvenBlock(tuple(box for box, _ in pieces), length, self._slice.read(at, end, NAME), region.is_inline)
                start, at = start + length, end


def _require_whole(spec: TensorSpec, boxes: Sequence[BoxBounds]) -> None:
    """Raises unless the boxes, which lie in the tensor, have each of its elements once."""
    if sum(prod(box.sizes) for box in boxes) != prod(spec.shape):
        raise _wrong(f"it does not have all blocks of {spec.name!r}")
    if not tiles(spec.shape, boxes):
        raise _wrong(f"two blocks of {spec.name!r} have the same elements")


def _slice(item: object) -> Slice:
    if type(item) is not list or [type(field) for field in item] != [int, bytes, bytes, bytes]:
        raise TypeError("a slice is malformed")
    return Slice(*item)


def _signed(items: Sequence[Any]) -> SignedRef:
    store, log, ref, root, step, number, time_ns, key, signature = items
    sizes = ((store, 16), (root, DIGEST_BYTES), (key, PUBLIC_KEY_BYTES), (signature, SIGNATURE_BYTES))
    numbers = [number, time_ns, *([] if step is None else [step])]
    is_typed = all(type(value) is bytes and len(value) == size for value, size in sizes)
    if not is_typed or any(type(text) is not str or len(text) > MAX_NAME_BYTES for text in (ref, log)):
        raise ValueError("a signature is malformed")
    if any(type(value) is not int or not 0 <= value <= MAX_STEP for value in numbers):
        raise ValueError("a signature has an impossible number")
    statement = RefStatement(LogName(store, log), ref=ref, root=Digest(root), step=step, number=number, time_ns=time_ns)
    return SignedRef(statement, key, signature)


def _wrong(problem: str) -> CorruptObjectError:
    return CorruptObjectError(f"{NAME} is not valid: {problem}; {_ADVICE}", object_id=NAME)
