"""Damaged and hostile objects of every kind: either what was written, or one of our errors, within bounded memory."""

import tracemalloc
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.common.ids import DIGEST_BYTES
from tensorstore_ck.errors import CorruptObjectError, FormatVersionError
from tensorstore_ck.format import tree, values
from tensorstore_ck.format.block_assignment import assign_blocks, decode_regions, ranks_with_layout, regions_of_rank, regions_of_tensor
from tensorstore_ck.format.layout import ExplicitRegions, Layout
from tensorstore_ck.format.part import Part, decode_values
from tensorstore_ck.format.part_index import PartIndex
from tensorstore_ck.format.record import Record, decode_metadata
from tensorstore_ck.format.sealed import HEADER_BYTES
from tensorstore_ck.log import RefTable, checkpoint
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.entry import Entry
from tensorstore_ck.log.fold import fold
from tests.effort import in_turns
from tests.format import samples
from tests.format.samples import ALL, SEALED, body_of, kind_of, pack, places, replaced, sealed_body, with_fields

Refused = (CorruptObjectError, FormatVersionError)
KINDS = sorted(SEALED)
NOT_READ = {"signatures"}
"""Fields that this build ignores."""
MAY_BE_ABSENT = {"tree", "mesh", "placements", "coordinate", "regions"}
"""Where they are nil in a sample, another sample has them."""
OPTIONAL = {"step", "parent", "regions"}

NUMBERS = (0, -1, 7, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 1.0, float("nan"), float("inf"))
TEXTS = ("", "7", "x" * 2000, b"", b"x", bytes(31), bytes(32), b"\xff" * 64, b"\xff" * 4096)
LISTS: tuple[object, ...] = ([], [0], [b"x", "x"], ["t", 0, 0])
MAPS: tuple[object, ...] = ({}, {"op": "put", "critical": True}, {"x": float("-inf")})
WEIRD: list[object] = [None, True, False, *NUMBERS, *TEXTS, *LISTS, *MAPS]
HUGE: tuple[object, ...] = (1 << 32, (1 << 63) - 1, "9" * 5000)
TURNS = 8


def use(decoded: object) -> None:
    """What comes next after decoding: nothing in it may be a trap."""
    try:
        match decoded:
            case Part():
                decoded.part_id()
                if decoded.layout_of is not None:
                    plan_of(samples.spread_layout(), decoded)
                for row in range(len(decoded.extents)):
                    decoded.block_id(row)
                for value in decode_values(decoded, "a part"):
                    values.describe(value)
                    values.decode(value)
            case Record():
                decode_metadata(decoded, "a record")
            case Layout():
                for rank in range(2):
                    held = regions_of_rank(decoded, rank, (0, 1), [ExplicitRegions(number, ()) for number in range(len(decoded.tensors))])
                    small = [region for region in held if region.size_bytes(decoded.tensors[region.tensor]) < 1 << 20]
                    list(assign_blocks(decoded, small, rank, 4096))
                list(tree.leaves(tree.parse(decoded, 1 if decoded.spreads else 6)))
            case Entry():
                with MemoryTable().batch() as batch:
                    fold(decoded, batch)
                    RefTable(batch).branches()
            case checkpoint.Checkpoint():
                with MemoryTable().batch() as batch:
                    checkpoint.load(batch, decoded)
                    list(RefTable(batch).branches())
    except Refused:
        pass


def plan_of(layout: Layout, part: Part) -> None:
    """What a reader does with a part of many ranks, and what it checks first."""
    if part.world_size == 6 and part.rank < 6:
        ranks = ranks_with_layout(part.layout_of or b"", part.rank, 6)
        plan = PartIndex(layout, part, ranks, 4 << 20, "a part")
        told = {each.tensor: each.boxes for each in decode_regions(layout, part.regions, "a part")}
        for tensor in range(len(layout.tensors)):
            plan.of(tensor)
            list(regions_of_tensor(layout, tensor, ranks, lambda rank, tensor: told.get(tensor, ()) if rank == 0 else ()))


def survives(kind: str, data: bytes) -> bool:
    """Whether `data` is accepted; any error but ours escapes."""
    try:
        decoded = ALL[kind].decode(data)
    except Refused:
        return False
    use(decoded)
    return True


@pytest.mark.parametrize("kind", ALL)
def test_the_sample_is_accepted_and_encodes_to_itself(kind: str) -> None:
    decoded = ALL[kind].decode(ALL[kind].sample)
    use(decoded)
    encode: Callable[[], bytes] | None = getattr(decoded, "encode", None)
    assert encode is None or encode() == ALL[kind].sample


@pytest.mark.parametrize("kind", sorted(ALL))
def test_every_changed_byte_truncation_and_extension_is_noticed(kind: str) -> None:
    sample = ALL[kind].sample
    for position, bit in in_turns(range(len(sample)), range(8)):
        damaged = bytearray(sample)
        damaged[position] ^= 1 << bit
        assert not survives(kind, bytes(damaged)), (position, bit)
    for length in range(len(sample)):
        assert not survives(kind, sample[:length])
    for tail in (b"\0", b"\n", b"\xc0", sample):
        assert not survives(kind, sample + tail)
        assert not survives(kind, tail + sample)


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_never_passes_for_another(kind: str) -> None:
    own = SEALED[kind].sample
    for other in KINDS:
        is_same = kind_of(other) == kind_of(kind)
        assert survives(other, own) == is_same
        relabelled = SEALED[other].sample[:HEADER_BYTES] + own[HEADER_BYTES:]
        assert survives(other, relabelled) == is_same
        resealed = sealed_body(other, own[HEADER_BYTES:-DIGEST_BYTES])
        assert survives(other, resealed) == is_same
        assert is_same or resealed[-DIGEST_BYTES:] != own[-DIGEST_BYTES:]
    assert not survives("pack", own)
    assert not survives("config", own)
    assert not survives(kind, pack())


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_one_type_and_unknown_ones_are_ignored(kind: str) -> None:
    SEALED[kind].decode(with_fields(kind, unknown={"a": [1]}))
    for version in (0, 2, 1 << 63, -1, True, 1.0, "1", None, [1]):
        assert not survives(kind, with_fields(kind, v=version)), version
    body = body_of(SEALED[kind].sample)
    for field in body.keys() - NOT_READ:
        if body[field] is not None:
            without = {key: value for key, value in body.items() if key != field}
            assert field in MAY_BE_ABSENT or not survives(kind, sealed_body(kind, msgpack.packb(without))), f"without {field}"
        for weird in WEIRD:
            is_other = type(weird) is not type(body[field]) and (weird is not None or body[field] is not None)
            if is_other and not (body[field] is None and field in MAY_BE_ABSENT):
                optional = weird is None and field in OPTIONAL
                accepted = survives(kind, with_fields(kind, **{field: weird}))
                assert not accepted or optional or field == "tree", (field, weird)


@pytest.mark.parametrize("kind", KINDS)
def test_any_value_anywhere_is_accepted_or_refused_and_huge_numbers_cost_no_memory(kind: str) -> None:
    """The values take turns."""
    body = body_of(SEALED[kind].sample)
    count = len(list(places(body)))

    def place(number: int, value: object) -> None:
        survives(kind, sealed_body(kind, msgpack.packb(replaced(body, number, value))))

    for number, first in in_turns(range(count), range(TURNS)):
        for weird in WEIRD[first::TURNS]:
            place(number, weird)
    tracemalloc.start()
    try:
        for number, huge in in_turns(range(count), HUGE):
            place(number, huge)
        for field in ("dims_of", "shapes", "extents", "blobs", "key_sizes", "value_sizes"):
            if field in body:
                survives(kind, with_fields(kind, **{field: b"\xff\xff\xff\x7f" * (len(body[field]) // 4)}))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_in_the_arrays_may_be_anything(kind: str) -> None:
    body = body_of(SEALED[kind].sample)
    for field, value in body.items():
        if type(value) is bytes:
            for position, byte in in_turns(range(len(value)), (0, 1, 0x7F, 0x80, 0xFF)):
                changed = value[:position] + bytes([byte]) + value[position + 1 :]
                survives(kind, with_fields(kind, **{field: changed}))
            for length in (*range(min(len(value), 70)), len(value) - 1):
                survives(kind, with_fields(kind, **{field: value[:length]}))
            survives(kind, with_fields(kind, **{field: value + value}))


@settings(max_examples=300)
@given(st.sampled_from(KINDS), st.data())
def test_bodies_with_random_bytes_changed_under_a_right_seal(kind: str, data: st.DataObject) -> None:
    body = bytearray(SEALED[kind].sample[HEADER_BYTES:-DIGEST_BYTES])
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(body) - 1))
        body[start : start + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    survives(kind, sealed_body(kind, bytes(body)))


def test_hostile_msgpack_costs_no_memory() -> None:
    count, head, two = ((1 << 32) - 1).to_bytes(4, "big"), b"\x81\xa1v", b"\x82\xa1v\x01"
    long = [b"\xdd" + count, b"\xdf" + count, head + b"\xc6" + count, head + b"\xdb" + count]
    deep = [head + (b"\xdd" + (90_000).to_bytes(4, "big")) * 1000 + bytes(100_000), head + b"\x91" * 90_000 + b"\xc0"]
    deep += [head + b"\x81\xa0" * 90_000 + b"\xc0", head + b"\xc9" + (64).to_bytes(4, "big") + b"\x01" + bytes(64)]
    keys = [two + key for key in (b"\xa1v\x01", b"\x01\x01", b"\xc4\x01a\x01", b"\x90\x01", b"\xa2\xff\xff\x01")]
    for number, body in enumerate((*long, *deep, *keys, b"\x81\xa1v\x01\xc0", b"\x91\x01", b"\x01", b"", b"\xc1")):
        kind = KINDS[number % len(KINDS)]
        data = sealed_body(kind, body)
        tracemalloc.start()
        try:
            with pytest.raises(CorruptObjectError):
                SEALED[kind].decode(data)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20, number
        finally:
            tracemalloc.stop()


def test_messages_stay_short_whatever_the_object_says() -> None:
    for field, value in (("rank", "9" * 100_000), ("layout", "x" * 100_000), ("ids", list(range(50_000)))):
        with pytest.raises(CorruptObjectError) as caught:
            SEALED["part"].decode(with_fields("part", **{field: value}))
        assert len(str(caught.value)) < 400
