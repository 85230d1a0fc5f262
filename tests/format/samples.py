"""One real object of each form, small and with every field in use; and what tests do to them.

A form is a kind of sealed object, or one that looks different where a snapshot has many ranks.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, Ulid, block_id, derived_hash
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format import codec, values
from tensorstore_ck.format.block_assignment import assign_blocks, encode_regions, regions_of_rank
from tensorstore_ck.format.codec import registry
from tensorstore_ck.format.layout import ExplicitRegions, Layout, Sharding, SharedStorage, Spread, TensorSpec, decode_layout
from tensorstore_ck.format.pack import (
    ENTRY_DTYPE,
    HEADER,
    PLAIN_HEADER,
    TRAILER,
    Footer,
    decode_footer,
    encode_footer,
    footer_bytes,
    stored_check,
)
from tensorstore_ck.format.part import BLOB_DTYPE, EXTENT_DTYPE, Part, decode_part, encode_values
from tensorstore_ck.format.part_index import PartIndex
from tensorstore_ck.format.proof import decode_proof, make_proof
from tensorstore_ck.format.record import Record, decode_record, encode_metadata
from tensorstore_ck.format.ref_statement import LogName, RefStatement, SignedRef
from tensorstore_ck.format.sealed import HEADER_BYTES, KINDS, MAGIC
from tensorstore_ck.format.sharding import BoxBounds, Mesh, Shard
from tensorstore_ck.format.store_config import BLOCK_BYTES, decode_config, new_config
from tensorstore_ck.log import checkpoint
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.entry import Entry, decode_entry, genesis_hash, seal_entry
from tensorstore_ck.log.fold import fold
from tensorstore_ck.log.operations import Op

ROOT = Digest(bytes(range(32)))
ULID = Ulid(bytes(range(16)))


def layout() -> Layout:
    """Every kind of node; tensors inline, of one block and of none; a shared storage."""
    tensors = [
        TensorSpec("model.weight", "bfloat16", 2, (64, 48)),
        TensorSpec("model.bias", "float32", 4, (48,)),
        TensorSpec("array", "np:<f8", 8, (2, 0, 3)),
        TensorSpec("scalar", "int64", 8, ()),
    ]
    tree = [
        "d",
        ["model", 7, ["u", [1, "a"]], "moment", "rest", "config"],
        [
            ["o", ["weight", "bias"], [["t", 0, 3], ["w", 1, "float32", [4, 12], [12, 1], 0, 1]], ["d", ["version"], [None]]],
            ["l", [2, None, ["u", [3, None]]]],
            ["c", ["x"], [None]],
            ["f", "builtins.list", ["y"], [["l", []]]],
            ["n", "module:Point", ["x", "y"], [None, None]],
            ["r", "a.Type", ["d", [], []]],
        ],
    ]
    return Layout(tensors, tree, [SharedStorage(256, (1, 3), (0, 192))])


def value_list() -> list[object]:
    """One value for each hole of the layout's tree."""
    return [values.encode(value, "x") for value in (1, (2, "é", b"\0"), 1 << 70, {1 + 2j, "s"}, np.float16(1.5), None)]


def part() -> Part:
    sealed = layout().encoded
    blobs = np.array([(1, 0, len(sealed)), (1, 0, 70_000)], BLOB_DTYPE)
    extents = np.zeros(4, EXTENT_DTYPE)
    extents[:] = [
        (0, 0, 64, len(sealed), len(sealed), -1, 0, 0),
        (0, 1, 64 + len(sealed), 300, 70_000, -1, 1, 0),
        (1, 5, 4096, 6000, 6144, 3, 3, 0),
        (1, 9, 1 << 20, 6144, 6144, -1, 0, 0),
    ]
    ids = b"".join(block_id(bytes([number])) for number in range(3))
    packs = [Ulid(bytes([1] * 16)), Ulid(bytes([2] * 16))]
    inline = bytes(range(200))
    return Part(Digest(sealed[-32:]), 0, 1, blobs, ids, encode_values(value_list()), inline, packs, extents, block_id(b"base"), 17)


def spread_layout() -> Layout:
    """What one of several layouts of six ranks may be: tensors spread in every way, over two meshes."""
    meshes = [Mesh((2, 2), (0, 1, 3, 4)), Mesh((4,), (4, 3, 1, 0))]
    tensors = {
        "tp": ((8, 600), Sharding(0, (Shard(0), Shard(1)))),
        "fsdp over tp": ((9, 600), Sharding(0, (Shard(0, 2), Shard(0)))),
        "strided": ((4000, 2), Sharding(0, (Shard(0, 2), None))),
        "hsdp": ((5, 3), Sharding(0, (None, Shard(0)))),
        "fsdp": ((6, 700), Sharding(1, (Shard(0),))),
        "same": ((2000,), None),
        "boxes": ((40, 300), "boxes"),
        "flat": ((3000, 2), "flat"),
        "empty": ((0, 7), Sharding(1, (Shard(1),))),
    }
    specs = [TensorSpec(name, "float32", 4, shape) for name, (shape, _) in tensors.items()]
    spreads: list[Spread] = [spread for _, spread in tensors.values()]  # type: ignore[misc]
    return Layout(specs, ["d", [*tensors, "step"], [*range(len(specs)), None]], [], meshes, spreads)


def spread_part(rank: int = 0) -> Part:
    """What rank 0, 1, 3 or 4 of six saves; ranks 2 and 5 have another layout."""
    layout, others = spread_layout(), (0, 1, 3, 4)
    number = others.index(rank)
    explicit = [
        ExplicitRegions(6, (BoxBounds((10 * number, 0), (5, 300)), BoxBounds((10 * number + 5, 0), (5, 300)))),
        ExplicitRegions(7, (BoxBounds((1500 * number,), (1500,)),)),
    ]
    held = regions_of_rank(layout, rank, others, explicit)
    own = list(assign_blocks(layout, held, rank, 4 << 20))
    raw = [len(layout.encoded)] if number == 0 else []
    raw += [length for share in own if not share.is_inline for length in share.lengths]
    extents = np.zeros(len(raw), EXTENT_DTYPE)
    for row, length in enumerate(raw):
        extents[row] = (0, row, 64 + sum(raw[:row]), length, length, -1, 0, 0)
    return Part(
        Digest(layout.encoded[-32:]),
        rank,
        6,
        np.array([(len(raw[:1]) if number == 0 else 0, 0, len(layout.encoded))], BLOB_DTYPE),
        b"".join(block_id(bytes([row])) for row in range(len(raw))),
        encode_values([values.encode(7, "x")] if number == 0 else []),
        b"".join(bytes(share.lengths[0]) for share in own if share.is_inline),
        [ULID],
        extents,
        b"",
        3,
        np.array([0, 0, 1, 0, 0, 1], "<u2").tobytes(),
        encode_regions(explicit),
    )


def rank_state() -> Part:
    """What is rank 1's alone, of two."""
    return part()._replace(rank=3, world_size=2)


def record() -> Record:
    metadata = encode_metadata({"lr": 3e-4, "list": [1, None, True, "é"], "nested": {"a": {}}})
    return Record(
        "runs/gpt", 1000, ROOT, metadata, {"loss": 2.5, "nan": float("nan")}, 1_700_000_000_000_000_000, [ULID], bytes(32), 12, 34
    )


def record_of(parts: Sequence[Part], ranks: int) -> Record:
    """The record of parts of so many ranks, some of which may be missing."""
    ids = {part.rank: part.part_id() for part in parts}
    return record()._replace(parts=[ULID] * ranks, part_ids=b"".join(ids.get(rank, bytes(32)) for rank in range(ranks)))


def proof(tensor: int = 0) -> bytes:
    """Of a part with blobs before its blocks, which has tensors of two blocks, of one, and inside it; with a signature."""
    tensors = [TensorSpec("a", "uint8", 1, (5, 1 << 20)), TensorSpec("b", "uint8", 1, (9000,)), TensorSpec("c", "uint8", 1, (7,))]
    sealed = Layout(tensors, None).encoded
    extents = np.zeros(5, EXTENT_DTYPE)
    extents["raw"] = [1, 1, 4 << 20, 1 << 20, 9000]
    held = part()._replace(
        layout_id=Digest(sealed[-32:]),
        blobs=np.array([(1, 0, len(sealed)), (1, 0, 9)], BLOB_DTYPE),
        ids=b"".join(block_id(bytes([row])) for row in range(5)),
        inline=bytes(7),
        extents=extents,
    )
    made = record_of([held], 1)
    statement = RefStatement(LogName(bytes(16), "log"), ref="models/base", root=made.root(), step=made.step, number=3, time_ns=7)
    regions = PartIndex(decode_layout(sealed, "a layout"), held, (0,), BLOCK_BYTES, "a part").of(tensor)
    signed = SignedRef(statement, bytes(32), bytes(64))
    return make_proof(made, [(held, regions)], layout=sealed, tensor=tensor, block_bytes=BLOCK_BYTES, signed=signed).encode()


def operations() -> list[Op]:
    sealed = record().encode()
    unknown = Op({"op": "invented", "critical": False, "field": [1, {"a": b"x"}]})
    return [
        Op.put("runs/gpt", ULID, record(), sealed, anchor=3, txn=bytes(16)),
        Op.branch("copy", record().root()),
        Op.reset("copy", record().root()),
        Op.tag("v1", record().root()),
        Op.annotate(record().root(), {"later": 1.0}),
        Op.mark(record().root(), "bad", "diverged"),
        Op.abort(bytes([9] * 16)),
        Op.policy("runs/*", {"keep_last": 5, "keep_best": [[3, "val_loss", "min"]], "expire_after": 3600.0}),
        unknown,
    ]


def sealed_entry() -> bytes:
    return seal_entry(1, genesis_hash(bytes(16)), operations(), write_id=bytes(16), time_ns=1_700_000_000, actor="me@host:1")[0]


def sealed_checkpoint() -> bytes:
    table = MemoryTable()
    entry = decode_entry(sealed_entry(), "entry", 1)
    with table.batch() as batch:
        fold(entry, batch)
        dumped = checkpoint.dump(batch, 1, entry.hash)
    assert dumped is not None
    return dumped


def pack_of(blocks: list[bytes], *, compress: bool = True) -> bytes:
    """A pack with these blocks."""
    header = PLAIN_HEADER
    body = bytearray(header)
    entries = np.zeros(len(blocks), ENTRY_DTYPE)
    for number, raw in enumerate(blocks):
        kind, stored = registry.encode_lz4(raw) if compress else (codec.Codec.RAW, raw)
        entries[number] = (block_id(raw), len(body), stored_check(stored) if kind else 0, len(stored), len(raw), kind, 0, 0)
        body += stored
    return bytes(body) + encode_footer(header, entries)


def pack() -> bytes:
    return pack_of([b"a" * 1000, bytes(range(100)), b"z"])


def decode_pack(data: bytes, name: str = "a pack") -> Footer:
    """Footer first, then every block: as fsck reads a pack."""
    size = footer_bytes(data[-TRAILER.size :], len(data), name)
    footer = decode_footer(data[: HEADER.size], data[-size:], len(data), name)
    for entry in footer.entries:
        start = int(entry["offset"])
        stored = memoryview(data)[start : start + int(entry["stored"])]
        raw = codec.decode(int(entry["codec"]), stored, int(entry["raw"]), name)
        if block_id(raw) != entry["id"].tobytes() or (entry["codec"] and stored_check(stored) != entry["check"]):
            raise CorruptObjectError(f"{name}: a block does not match its hash")
    return footer


def config_body() -> dict[str, Any]:
    body: dict[str, Any] = json.loads(new_config(exclusive_create=True).encode())
    del body["checksum"]
    return body


def config_bytes(body: Mapping[str, object]) -> bytes:
    """store.json of any content, with a right checksum."""
    checksum = derived_hash("store.json", _json(body)).hex()
    return _json({**body, "checksum": checksum})


def _json(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, sort_keys=True, indent=1).encode() + b"\n"


class Format(NamedTuple):
    """A kind of object: one of it, and its decoder."""

    sample: bytes
    decode: Callable[[bytes], object]


def decode_log(data: bytes) -> Entry:
    return decode_entry(data, "an entry", 1)


def _layout(data: bytes) -> Layout:
    return decode_layout(data, "a layout")


def _part(data: bytes) -> Part:
    return decode_part(data, "a part")


SEALED: Mapping[str, Format] = {
    "layout": Format(layout().encoded, _layout),
    "layout of ranks": Format(spread_layout().encoded, _layout),
    "part": Format(part().encode(), _part),
    "part of ranks": Format(spread_part().encode(), _part),
    "part with a rank state": Format(rank_state().encode(), _part),
    "snapshot": Format(record().encode(), lambda data: decode_record(data, "a record")),
    "log": Format(sealed_entry(), decode_log),
    "checkpoint": Format(sealed_checkpoint(), lambda data: checkpoint.decode_checkpoint(data, "a checkpoint")),
}
ALL: Mapping[str, Format] = {
    **SEALED,
    "pack": Format(pack(), decode_pack),
    "proof": Format(proof(), decode_proof),
    "config": Format(new_config(exclusive_create=True).encode(), lambda data: decode_config(data, "memory://")),
}


def kind_of(form: str) -> str:
    """The kind of object that has this form."""
    return form.partition(" ")[0]


def sealed_body(form: str, body: bytes) -> bytes:
    """Any bytes under a right seal, so that what is behind it is reached."""
    kind = kind_of(form)
    head = MAGIC + KINDS[kind] + body
    return head + derived_hash(f"{kind} object", head)


def body_of(sealed: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = msgpack.unpackb(sealed[HEADER_BYTES:-DIGEST_BYTES])
    return decoded


def with_fields(form: str, **fields: object) -> bytes:
    """The sample of a form with other fields, under a right seal."""
    return sealed_body(form, msgpack.packb({**body_of(SEALED[form].sample), **fields}))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside a body."""
    items = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def replaced(body: dict[str, Any], number: int, value: object) -> dict[str, Any]:
    """A copy of `body` with the value at position `number` replaced."""
    body = copy.deepcopy(body)
    container, key = list(places(body))[number]
    container[key] = value
    return body
