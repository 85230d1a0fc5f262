"""Parts, records, layouts and store.json: what must hold between their fields, and what their hashes cover."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from tensorstore_ck.errors import CorruptObjectError, FormatVersionError, InvalidOptionError
from tensorstore_ck.format.layout import MAX_NAME_BYTES, MAX_TENSOR_BYTES, Layout, SharedStorage, TensorSpec, decode_layout
from tensorstore_ck.format.pack import MAX_BLOCK_BYTES
from tensorstore_ck.format.part import BLOB_DTYPE, Part, decode_part, decode_values
from tensorstore_ck.format.record import check_metrics, decode_metadata, decode_record, encode_metadata
from tensorstore_ck.format.store_config import decode_config, new_config
from tests.effort import in_turns
from tests.format import samples
from tests.format.samples import with_fields


def changed_extents(field: str, value: int, row: int = 0) -> Part:
    part = samples.part()
    extents = part.extents.copy()
    extents[field][row] = value
    return part._replace(extents=extents)


def refused(part: Part, match: str) -> None:
    with pytest.raises(CorruptObjectError, match=match):
        decode_part(part.encode(), "a part")


def test_extents_stay_in_bounds_and_chains_of_delta_bases_end() -> None:
    wrong = {
        "pack": (2, (1 << 32) - 1),
        "raw": (0, MAX_BLOCK_BYTES + 1),
        "stored": (MAX_BLOCK_BYTES + 1,),
        "offset": (63, (1 << 40) + 1, (1 << 64) - 1),
    }
    for field, values in wrong.items():
        for value, row in product(values, range(4)):
            refused(changed_extents(field, value, row), "an extent is out of bounds")
    for row, base in ((0, 0), (0, 1), (0, 4), (0, -2), (3, 3), (2, 2), (0, (1 << 31) - 1), (0, -(1 << 31))):
        refused(changed_extents("base", base, row), "a delta base is out of bounds")


def test_tables_of_a_part_fit_each_other_and_its_values_are_a_list() -> None:
    part = samples.part()
    blobs = np.array([(1, 0, 10), (3, 0, 10)], BLOB_DTYPE)
    overflow = np.array([((1 << 32) - 1, 0, 10)] * 2, BLOB_DTYPE)
    for wrong in (
        part._replace(extents=part.extents[:-1]),
        part._replace(ids=part.ids[:-32]),
        part._replace(ids=part.ids + bytes(32)),
        part._replace(base_ids=b""),
        part._replace(blobs=blobs),
        part._replace(blobs=overflow),
        part._replace(blobs=part.blobs[:0]),
    ):
        refused(wrong, "its tables differ in length")
    for wrong in (part._replace(ids=part.ids[:-1]), part._replace(base_ids=part.base_ids[:-1])):
        refused(wrong, "an id is truncated")
    for rank, world_size in ((2, 1), (0, 0), (0, (1 << 20) + 1), (12, 6)):
        refused(part._replace(rank=rank, world_size=world_size), "its rank or world size")
    refused(part._replace(blobs=np.array([(1, 0, 1 << 40)], BLOB_DTYPE)), "its layout is too large")
    refused(part._replace(anchor=-1), "anchor is -1")
    for values in (b"\x80", b"\xc0", b"", b"\x90\x90", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(CorruptObjectError):
            decode_values(samples.part()._replace(values=values), "a part")


def test_the_part_id_covers_the_logical_section_and_nothing_else() -> None:
    part = samples.part()
    other_blobs = part.blobs.copy()
    other_blobs["size"][1] += 1
    logical = [
        part._replace(layout_id=samples.ROOT),
        part._replace(rank=1, world_size=2),
        part._replace(world_size=2),
        part._replace(blobs=other_blobs),
        part._replace(ids=part.ids[32:] + part.ids[:32]),
        part._replace(values=part.values + b"\0"),
        part._replace(inline=part.inline + b"\0"),
        part._replace(values=part.values[:-1], inline=part.values[-1:] + part.inline),
        part._replace(ids=part.ids + part.values[:32], values=part.values[32:]),
    ]
    assert len({part.part_id(), *(other.part_id() for other in logical)}) == 1 + len(logical)
    for physical in (changed_extents("offset", 100), part._replace(anchor=3), part._replace(packs=[*part.packs, samples.ULID])):
        assert physical.part_id() == part.part_id()


def test_the_root_covers_the_logical_content_and_nothing_else() -> None:
    record = samples.record()
    logical = [
        record._replace(step=None),
        record._replace(step=0),
        record._replace(step=1001),
        record._replace(parent=None),
        record._replace(parent=None, step=None),
        record._replace(metadata=encode_metadata(None)),
        record._replace(part_ids=bytes(31) + b"\1"),
        record._replace(part_ids=bytes(64)),
        record._replace(part_ids=bytes(32) + b"\1" * 32),
        record._replace(part_ids=b"\1" * 32 + bytes(32)),
    ]
    assert len({record.root(), *(other.root() for other in logical)}) == 1 + len(logical)
    assert record._replace(ref="x", metrics={}, time_ns=0, parts=[], logical_bytes=0, new_bytes=0).root() == record.root()
    for step in (None, 0, (1 << 63) - 1):
        assert decode_record(record._replace(step=step).encode(), "a record").step == step


def test_records_that_contradict_themselves() -> None:
    wrong: dict[str, tuple[Any, ...]] = {
        "root": (bytes(32),),
        "parts": (b"", bytes(32), bytes(15)),
        "part_ids": (bytes(64),),
        "parent": (bytes(31),),
        "step": (1 << 63,),
        "metrics": ({"x": 1}, {"x": True}),
        "time_ns": (-1,),
        "new_bytes": (-1,),
        "logical_bytes": (1 << 63,),
    }
    for changed in ({"part_ids": b"", "parts": b""}, *({field: value} for field, values in wrong.items() for value in values)):
        with pytest.raises(CorruptObjectError):
            decode_record(with_fields("snapshot", **changed), "a record")


def test_metadata_comes_back_and_invalid_metadata_and_metrics_are_refused() -> None:
    metadata = {"a": [1, -1, (1 << 64) - 1, 0.5, None, True, "é"], "b": {"c": {}}}
    assert decode_metadata(samples.record()._replace(metadata=encode_metadata(metadata)), "a record") == metadata
    deep: list[Any] = []
    for _ in range(20):
        deep = [deep]
    for wrong in (1 << 64, b"x", {1: 2}, object(), "\ud800", {"\ud800": 1}, deep, {1, 2}, "x" * (1 << 20)):
        with pytest.raises(InvalidOptionError):
            encode_metadata({"key": wrong})
    invalid: list[Any] = [{"": 1.0}, {"x" * 257: 1.0}, {1: 1.0}, {"x": "high"}, {"x": None}, {"x": 10**400}, {"\ud800": 1.0}, {"x": [1]}]
    for metrics in invalid:
        with pytest.raises(InvalidOptionError):
            check_metrics(metrics)


def layout_with(*specs: TensorSpec, storages: tuple[SharedStorage, ...] = ()) -> bytes:
    return Layout(specs, None, storages).encoded


def test_a_layout_comes_back_and_tensors_that_cannot_be_are_refused() -> None:
    layout = samples.layout()
    decoded = decode_layout(layout.encoded, "a layout")
    assert (list(decoded.tensors), decoded.tree, list(decoded.storages)) == (list(layout.tensors), layout.tree, list(layout.storages))
    assert [spec.size_bytes for spec in decoded.tensors] == [6144, 192, 0, 8]
    extreme = [TensorSpec("x", "uint8", 1, shape) for shape in ((), (0,), (MAX_TENSOR_BYTES,), (0, 1 << 62), (1,) * 64)]
    for spec in extreme:
        assert decode_layout(layout_with(spec), "a layout").tensors == [spec]
    shapes = [(1 << 49,), (1 << 30, 1 << 30, 1 << 30), (0, 1 << 40, 1 << 40), (-1,), (-1, -1), (1,) * 65]
    specs = [TensorSpec("x", "uint8", 1, shape) for shape in shapes]
    specs += [TensorSpec("x", "uint8", item_bytes, (1,)) for item_bytes in (0, -1, 4097)]
    for spec in (*specs, TensorSpec("x", "u" * 65, 1, (1,)), TensorSpec("x" * (MAX_NAME_BYTES + 1), "uint8", 1, (1,))):
        with pytest.raises(CorruptObjectError):
            decode_layout(layout_with(spec), "a layout")


@pytest.mark.parametrize(
    "storage",
    [
        SharedStorage(19, (0, 1), (0, 10)),
        SharedStorage(30, (0, 1), (0, 9)),
        SharedStorage(30, (0, 1), (5, 0)),
        SharedStorage(30, (0, 0), (0, 10)),
        SharedStorage(30, (0, 2), (0, 10)),
        SharedStorage(30, (0, -1), (0, 10)),
        SharedStorage(30, (0, 1), (-1, 10)),
        SharedStorage(30, (0, 1), (0,)),
        SharedStorage(-1, (), ()),
        SharedStorage(MAX_TENSOR_BYTES + 1, (0,), (0,)),
    ],
    ids=str,
)
def test_shared_storages_hold_their_tensors_side_by_side(storage: SharedStorage) -> None:
    specs = TensorSpec("a", "uint8", 1, (10,)), TensorSpec("b", "uint8", 1, (10,))
    decode_layout(layout_with(*specs, storages=(SharedStorage(30, (1, 0), (15, 0)),)), "a layout")
    twice = SharedStorage(10, (0,), (0,)), SharedStorage(10, (0,), (0,))
    for encoded in (layout_with(*specs, storages=(storage,)), layout_with(*specs, storages=twice), layout_with(specs[0], specs[0])):
        with pytest.raises(CorruptObjectError):
            decode_layout(encoded, "a layout")


def test_every_changed_byte_of_store_json_is_noticed() -> None:
    data = new_config(exclusive_create=True).encode()
    for position, first in in_turns(range(len(data)), range(16)):
        for byte in range(first, 256, 16):
            if byte != data[position]:
                with pytest.raises((CorruptObjectError, FormatVersionError)):
                    decode_config(data[:position] + bytes([byte]) + data[position + 1 :], "memory://")


def test_configurations_with_a_right_checksum_that_cannot_be_used() -> None:
    body = samples.config_body()
    decode_config(samples.config_bytes(body), "memory://")
    newer: dict[str, tuple[object, ...]] = {"format": (2, "1"), "hash": ("blake3-keyed",), "features": (["new"], {}, 7)}
    corrupt: dict[str, tuple[object, ...]] = {
        "format": (True,),
        "block_bytes": (4095, 1 << 40, 4194304.0),
        "uuid": ("x", "{12345678-1234-5678-1234-567812345678}", 7),
        "log": ("", "../log", "log\n", None),
        "exclusive_create": (1,),
    }
    for error, wrong in ((FormatVersionError, newer), (CorruptObjectError, corrupt)):
        for key, values in wrong.items():
            for value in values:
                with pytest.raises(error):
                    decode_config(samples.config_bytes({**body, key: value}), "memory://")
            with pytest.raises(CorruptObjectError):
                decode_config(samples.config_bytes({name: each for name, each in body.items() if name != key}), "memory://")


def test_what_is_no_configuration_and_that_unknown_fields_are_ignored_but_not_lost_from_the_checksum() -> None:
    begun, nested = b'{"features": [], "format": 1, "hash": "blake3", ', b"[" * 500 + b"]" * 500
    fields = [b'"checksum": ' + nested, b'"checksum": "", "x": ' + nested, b'"checksum": NaN', b'"format": 1']
    numbers = b'{"features": [], "format": ' + b"9" * 5000 + b"}"
    for data in (b"", b"{}", b"[]", b"null", b'"format"', b"\xff\xfe{}", b"[" * 60_000, numbers, *(begun + each + b"}" for each in fields)):
        with pytest.raises(CorruptObjectError) as caught:
            decode_config(data, "memory://")
        assert len(str(caught.value)) < 400
    body = {**samples.config_body(), "note": "é"}
    data = samples.config_bytes(body)
    decode_config(data, "memory://")
    config = new_config(exclusive_create=False)
    assert decode_config(config.encode(), "memory://") == config
    with pytest.raises(CorruptObjectError):
        decode_config(data.replace(b"\\u00e9", b"\\u00e8"), "memory://")
