"""Proofs of tensors that ranks hold in every way; and what somebody makes of a proof who may change any byte of it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, block_id
from tensorstore_ck.errors import CorruptObjectError, FormatVersionError, MismatchError
from tensorstore_ck.format.block_assignment import assign_blocks, regions_of_rank
from tensorstore_ck.format.layout import Layout, TensorSpec
from tensorstore_ck.format.part import BLOB_DTYPE, EXTENT_DTYPE, Part
from tensorstore_ck.format.part_index import PartIndex
from tensorstore_ck.format.proof import Proof, ProvenTensor, decode_proof, make_proof
from tensorstore_ck.format.sealed import HEADER_BYTES
from tests.effort import effort, in_turns
from tests.format import samples

RANKS = (0, 1, 3, 4)
BLOCK_BYTES = 4 << 20


PARTS = [samples.spread_part(rank) for rank in RANKS]
RECORD = samples.record_of(PARTS, 6)
BODY = samples.proof()[HEADER_BYTES:-DIGEST_BYTES]
NAMES = [spec.name for spec in samples.spread_layout().tensors]


def prove(tensor: str, parts: Sequence[Part] = PARTS, *, block_bytes: int = BLOCK_BYTES) -> Proof:
    """The proof of a tensor that is spread over ranks."""
    layout, number = samples.spread_layout(), NAMES.index(tensor)
    plans = [(part, PartIndex(layout, part, RANKS, BLOCK_BYTES, "a part").of(number)) for part in parts]
    held = [(part, regions) for part, regions in plans if regions] or [(parts[0], [])]
    return make_proof(RECORD, held, layout=layout.encoded, tensor=number, block_bytes=block_bytes, signed=None)


@pytest.mark.parametrize("tensor", NAMES)
def test_a_tensor_of_several_parts(tensor: str) -> None:
    proof = decode_proof(prove(tensor).encode())
    assert (proof.root(), proof.step()) == (RECORD.root(), RECORD.step)
    found, layout, expected = proof.verify(), samples.spread_layout(), list[bytes]()
    assert (found.name, found.spec) == (tensor, layout.tensors[NAMES.index(tensor)])
    for part in PARTS:
        for held in PartIndex(layout, part, RANKS, BLOCK_BYTES, "a part").of(NAMES.index(tensor)):
            inline = part.inline[held.first : held.first + held.lengths[0]]
            expected += [inline] if held.is_inline else [part.block_id(row) for row in held.rows]
    assert [block.content for block in found.blocks] == expected
    assert sum(block.size_bytes for block in found.blocks) == found.spec.size_bytes


@pytest.mark.parametrize(("tensor", "lost"), [("boxes", 0), ("flat", 3), ("tp", 1)])
def test_a_proof_without_one_of_the_parts_is_refused(tensor: str, lost: int) -> None:
    parts = [part for number, part in enumerate(PARTS) if number != lost]
    with pytest.raises(CorruptObjectError, match="does not have all blocks of"):
        prove(tensor, parts).verify()


def test_the_parts_are_those_of_the_root_and_each_is_there_once() -> None:
    proof = prove("boxes")
    foreign = prove("boxes", [PARTS[0]._replace(values=b"\x91\x01"), *PARTS[1:]])
    for parts in ([*proof.parts[:1], *proof.parts], proof.parts[::-1], [foreign.parts[0], *proof.parts[1:]]):
        with pytest.raises(CorruptObjectError, match="is not of its snapshot, or not one of the tensor's"):
            proof._replace(parts=parts).verify()
    for layout in (samples.layout().encoded, proof.layout[:-1] + b"\0"):
        with pytest.raises(CorruptObjectError, match="its layout are not those of its snapshot"):
            proof._replace(layout=layout).verify()


def test_a_snapshot_that_has_elements_twice_proves_nothing() -> None:
    """The signer of the root may be the one who cheats: two blocks of the same rows, and none of others."""
    twice = [PARTS[0], PARTS[1]._replace(regions=PARTS[0].regions), *PARTS[2:]]
    layout, number = samples.spread_layout(), NAMES.index("boxes")
    held = [(part, PartIndex(layout, part, RANKS, BLOCK_BYTES, "a part").of(number)) for part in twice]
    proof = make_proof(samples.record_of(twice, 6), held, layout=layout.encoded, tensor=number, block_bytes=BLOCK_BYTES, signed=None)
    with pytest.raises(CorruptObjectError, match="two blocks of 'boxes' have the same elements"):
        proof.verify()


@pytest.mark.parametrize("tensor", [pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_another_size_of_blocks_is_refused_or_says_the_same(tensor: str) -> None:
    """No hash covers it; the numbers of blocks, which the hashes cover, fit one cut alone."""
    expected = prove(tensor).verify()
    for bits in range(12, 27):
        with suppress(CorruptObjectError):
            assert prove(tensor, block_bytes=1 << bits).verify() == expected


def test_a_tensor_at_the_border_of_two_writers_has_both_their_parts() -> None:
    """Two replicas divide 128 MiB at 64, in the middle of the tensor. With blocks of 8 MiB the first one would have all of it.

    The first part alone fits both sizes of blocks.
    """
    specs = [TensorSpec(f"{number}", "uint8", 1, (4 << 20,)) for number in range(30)]
    specs.insert(15, TensorSpec("w", "uint8", 1, (8 << 20,)))
    layout = Layout(specs, None)
    parts = [replicated_part(layout, rank) for rank in range(2)]
    record, held = samples.record_of(parts, 2), [(part, PartIndex(layout, part, (0, 1), BLOCK_BYTES, "a part").of(15)) for part in parts]
    assert [len(regions[0].rows) for _, regions in held] == [1, 1]

    def shown(count: int, block_bytes: int) -> list[int]:
        proof = make_proof(record, held[:count], layout=layout.encoded, tensor=15, block_bytes=block_bytes, signed=None)
        return [block.size_bytes for block in decode_proof(proof.encode()).verify().blocks]

    assert shown(2, BLOCK_BYTES) == [4 << 20, 4 << 20]
    with pytest.raises(CorruptObjectError, match="it lacks the part of a rank that may have blocks of 'w'"):
        shown(1, 2 * BLOCK_BYTES)
    for bits in range(12, 27):
        for count in (1, 2):
            with suppress(CorruptObjectError):
                assert shown(count, 1 << bits) == [4 << 20, 4 << 20]


def test_a_tensor_of_many_blocks() -> None:
    layout = Layout([TensorSpec("w", "uint8", 1, (10_000, 4096))], None)
    part = replicated_part(layout, 0, (0,), block_bytes=4096)
    held = [(part, PartIndex(layout, part, (0,), 4096, "a part").of(0))]
    made = make_proof(samples.record_of([part], 1), held, layout=layout.encoded, tensor=0, block_bytes=4096, signed=None)
    assert len(made.verify().blocks) == 10_000


def replicated_part(layout: Layout, rank: int, ranks: tuple[int, ...] = (0, 1), *, block_bytes: int = BLOCK_BYTES) -> Part:
    """What one of some replicas saves."""
    shares = list(assign_blocks(layout, regions_of_rank(layout, rank, ranks), rank, block_bytes))
    rows = sum(len(share.lengths) for share in shares)
    extents = np.zeros(rows, EXTENT_DTYPE)
    extents["raw"], extents["base"] = [length for share in shares for length in share.lengths], -1
    return samples.part()._replace(
        layout_id=Digest(layout.encoded[-DIGEST_BYTES:]),
        rank=rank,
        world_size=len(ranks),
        blobs=np.array([(0, 0, len(layout.encoded))], BLOB_DTYPE),
        ids=b"".join(block_id(b"%d %d" % (rank, row)) for row in range(rows)),
        inline=b"",
        extents=extents,
        layout_of=b"",
        regions=b"",
    )


@pytest.mark.parametrize("tensor", ["tp", "flat"])
def test_the_data_is_compared_where_its_blocks_lie(tensor: str) -> None:
    layout, number = samples.spread_layout(), NAMES.index(tensor)
    spec = layout.tensors[number]
    array = np.random.default_rng(1).integers(0, 1 << 31, spec.shape, np.int32)
    shown = prove(tensor).verify()
    blocks = []
    for block in shown.blocks:
        cut = [array[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))] for box in block.boxes]
        data = b"".join(each.tobytes() for each in cut)
        blocks.append(block._replace(content=data if block.is_inline else block_id(data)))
    true = shown._replace(blocks=blocks)
    true.require_data(array.tobytes())
    for at in (0, array.size // 2, array.size - 1):
        wrong = array.copy()
        wrong.reshape(-1)[at] ^= 1
        with pytest.raises(MismatchError, match="the data is not that of"):
            true.require_data(wrong.tobytes())
    with pytest.raises(MismatchError, match="bytes, and"):
        true.require_data(array.tobytes()[:-1])


@pytest.mark.parametrize("dtype", ["float32", ">f4", "float16", "complex64", "V6", "S6"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 3), (2, 3)])
def test_data_of_any_dtype_and_shape_is_compared(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    ProvenTensor("w", TensorSpec("w", f"np:{array.dtype.str}", array.itemsize, shape), []).require_data(array.data)


def test_a_signature_has_fields_of_their_own_sizes() -> None:
    """Also where two of them are equal."""
    true = decode_proof(samples.proof())
    assert true.signed is not None
    signed, of = true.signed, true.signed.statement.of._replace(store=bytes(true.signed.statement.root))
    for forged in (signed._replace(key=signed.signature), signed._replace(statement=signed.statement._replace(of=of))):
        with pytest.raises(CorruptObjectError, match="a signature is malformed"):
            decode_proof(true._replace(signed=forged).encode())


# --- any changed byte ---------------------------------------------------------------------------------------------------


def claims(data: bytes) -> Any:
    """Everything that a proof says, without what only leads there; None: it is refused."""
    try:
        proof = decode_proof(data)
        return proof.root(), proof.step(), proof.verify(), proof.signed
    except (CorruptObjectError, FormatVersionError):
        return None


def resealed(body: bytes) -> bytes:
    return samples.sealed_body("proof", body)


def test_the_sample_is_accepted() -> None:
    true = claims(samples.proof())
    assert [block.size_bytes for block in true[2].blocks] == [4 << 20, 1 << 20]
    assert resealed(BODY) == samples.proof()


def require_honest(data: bytes) -> None:
    """Whatever is accepted of this root is what an honest proof says: of this tensor, or of another one, of which all is in the slices."""
    found = claims(data)
    assert (
        found is None or found[0] != claims(samples.proof())[0] or found[:3] in [claims(samples.proof(tensor))[:3] for tensor in range(3)]
    )


@given(place=st.integers(0, len(BODY) - 1), byte=st.integers(0, 255))
@settings(max_examples=effort(60, 5000), deadline=None)
def test_any_byte_may_be_another_one(place: int, byte: int) -> None:
    require_honest(resealed(BODY[:place] + bytes([byte]) + BODY[place + 1 :]))


@pytest.mark.slow
def test_any_changed_byte_under_a_right_seal_proves_nothing_else_of_the_root() -> None:
    for place, bit in in_turns(range(0, len(BODY), effort(3, 1)), range(8)):
        changed = bytearray(BODY)
        changed[place] ^= 1 << bit
        require_honest(resealed(bytes(changed)))


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no such tensor": lambda body: body.update(tensor=3),
    "no parts": lambda body: body.update(parts=[]),
    "an unknown key": lambda body: body.update(more=1),
    "blocks of another size": lambda body: body.update(block_bytes=1 << 20),
    "blocks of a size that is no power of two": lambda body: body.update(block_bytes=5 << 20),
    "blocks of an impossible size": lambda body: body.update(block_bytes=1 << 40),
    "a record with another step": lambda body: body["record"].__setitem__(2, body["record"][2].replace(b"\xe8\x03", b"\xe9\x03")),
    "a record of another length": lambda body: body["record"].__setitem__(0, body["record"][0] + 1),
    "a part of another length": lambda body: body["parts"][0].__setitem__(0, body["parts"][0][0] + 1),
    "a part without its nodes": lambda body: body["parts"][0].__setitem__(3, bytes(32)),
    "a signature that is too short": lambda body: body["signed"].__setitem__(8, bytes(63)),
    "a signature of a negative number": lambda body: body["signed"].__setitem__(5, -1),
    "a slice that is none": lambda body: body.update(record=[1, 2, 3, 4]),
    "a version that is newer": lambda body: body.update(v=2),
    "another order": lambda body: body.update(v=body.pop("v")),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_forged_body_is_refused(forge: Callable[[dict[str, Any]], object]) -> None:
    body = msgpack.unpackb(BODY)
    forge(body)
    found = claims(resealed(msgpack.packb(body)))
    assert found is None or found[0] != claims(samples.proof())[0]
