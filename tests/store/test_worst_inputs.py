"""What each decoder of foreign bytes costs at most: the worst inputs known, four times as large, cost four times the steps, not more.

Memory: four bytes for each byte of the input, unless a row says what bounds it otherwise. Steps: lines of this package that run.
Keys that make Python look long for a place in a dict: tests/format/test_hash_probes.py.
"""

import json
import re
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import pytest
import zstandard

import tensorstore_ck
from tensorstore_ck.common.condition_values import parse_search
from tensorstore_ck.common.ids import derived_hash
from tensorstore_ck.common.metric_condition import condition
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format import tree, values
from tensorstore_ck.format.blake3_tree import take_slice
from tensorstore_ck.format.block_assignment import decode_regions
from tensorstore_ck.format.codec import Codec, decode
from tensorstore_ck.format.layout import MAX_RANKS, decode_layout
from tensorstore_ck.format.pack import ENTRY_DTYPE, FOOTER_MAGIC, PLAIN_HEADER, TRAILER, decode_footer
from tensorstore_ck.format.part import BLOB_DTYPE, EXTENT_DTYPE, GROUP_HEADER, PART_HEADER, decode_part, decode_values
from tensorstore_ck.format.proof import decode_proof
from tensorstore_ck.format.record import Record, decode_metadata, decode_record
from tensorstore_ck.format.relocation import RELOCATION_DTYPE, decode_relocation
from tensorstore_ck.format.sealed import BYTES_PER_STORED, KINDS, MAGIC, ParseBudget, object_hash, seal
from tensorstore_ck.format.store_config import decode_config
from tensorstore_ck.format.writer_record import decode_writer_record
from tensorstore_ck.integrations.importing import inspect_checkpoint
from tensorstore_ck.log import RefTable
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.checkpoint import decode_checkpoint, load
from tensorstore_ck.log.entry import decode_entry
from tensorstore_ck.log.fold import fold
from tensorstore_ck.log.table_rows import FOLD_VERSION
from tensorstore_ck.session.group import rank_kinds
from tensorstore_ck.session.group.channel import decode_record as decode_rank_record
from tensorstore_ck.session.group.rank_kinds import decode_kind
from tensorstore_ck.session.group.save_plan import decode_plan
from tensorstore_ck.session.staging import manifest
from tests.effort import effort
from tests.format import samples
from tests.format.forged import layout_of
from tests.integrations.importing.conftest import archive

pytestmark = pytest.mark.slow

PACKAGE: Final = str(Path(tensorstore_ck.__file__).parent)
ITEMS: Final = effort(1500, 40_000)
FREE_BYTES: Final = 1 << 20
OBJECT: Final = 120
"""Of a Python object for each byte: bodies of at most 1 MiB, or 2^24 items."""
LEAF: Final = 800
"""Of a value, its name and its place in a tree, for each byte of a pickle."""


class Row(NamedTuple):
    """`make` makes an input for a number of items; `read` decodes it; `factor`: bytes of memory for each byte of it."""

    make: Callable[[int], bytes]
    read: Callable[[bytes], object]
    factor: int = 4


def many(item: bytes) -> Callable[[int], bytes]:
    return lambda count: b"\xdd" + struct.pack(">I", count) + item * count


def sealed(kind: str, **fields: bytes) -> bytes:
    """A sealed object of fields that are msgpack already."""
    pairs = {"v": b"\x01", **fields}
    head = MAGIC + KINDS[kind] + bytes([0x80 + len(pairs)]) if len(pairs) < 16 else MAGIC + KINDS[kind] + b"\xde\x00" + bytes([len(pairs)])
    head += b"".join(msgpack.packb(name) + packed for name, packed in pairs.items())
    return head + derived_hash(f"{kind} object", head)


def packed(value: object) -> bytes:
    made: bytes = msgpack.packb(value)
    return made


def record(metadata: bytes = b"\x80", parts: int = 1, **more: bytes) -> bytes:
    made = Record("r", 1, None, metadata, {}, 1, [bytes(16)] * parts, bytes(32 * parts), 0, 0)  # type: ignore[list-item]
    whole = {"ref": "r", "step": 1, "parent": None, "metadata": metadata, "metrics": {}, "time_ns": 1, "parts": bytes(16 * parts)}
    whole |= {"part_ids": bytes(32 * parts), "logical_bytes": 0, "new_bytes": 0, "root": made.root()}
    return sealed("snapshot", **{name: packed(value) for name, value in whole.items()}, **more)


def entry(ops: bytes, **more: bytes) -> bytes:
    whole = {"n": 1, "prev": bytes(32), "write_id": bytes(16), "time_ns": 1, "actor": "x", "signatures": []}
    return sealed("log", **{name: packed(value) for name, value in whole.items()}, ops=ops, **more)


def part(**fields: bytes) -> bytes:
    whole = {
        "layout": bytes(32),
        "rank": 0,
        "world_size": 1,
        "blobs": bytes(BLOB_DTYPE.itemsize),
        "ids": b"",
        "values": b"\x90",
        "inline": b"",
    }
    whole |= {"packs": b"", "extents": b"", "base_ids": b"", "anchor": 0}
    return sealed("part", **{name: packed(value) for name, value in (whole | fields).items()})


def blocks(count: int) -> bytes:
    """A part of so many rows, each with a pack of its own."""
    extents = np.zeros(count, EXTENT_DTYPE)
    extents["raw"], extents["offset"], extents["base"], extents["pack"] = 1, 64, -1, np.arange(count)
    packs = b"".join(number.to_bytes(16, "little") for number in range(count))
    return part(packs=packs, extents=extents.tobytes(), ids=bytes(32 * count))


def checkpoint(keys: list[bytes], sizes: bytes | None = None) -> bytes:
    sizes = b"".join(struct.pack("<I", len(key)) for key in keys) if sizes is None else sizes
    whole = {"n": 1, "entry_hash": bytes(32), "fold": FOLD_VERSION, "key_sizes": sizes, "value_sizes": bytes(len(sizes))}
    return sealed("checkpoint", **{name: packed(value) for name, value in (whole | {"keys": b"".join(keys), "values": b""}).items()})


def footer(count: int) -> bytes:
    rows = np.zeros(count, ENTRY_DTYPE)
    rows["offset"] = len(PLAIN_HEADER)
    table = rows.tobytes()
    counts = struct.pack("<QQ", count, 0)
    return table + TRAILER.pack(count, 0, derived_hash("pack footer", PLAIN_HEADER, table, counts), FOOTER_MAGIC)


def moved(count: int) -> bytes:
    rows = np.zeros(count, RELOCATION_DTYPE)
    rows["from"], rows["offset"] = np.arange(count), 64
    return seal("moved", {"pack": bytes(16), "targets": bytes(16 * count), "rows": rows.tobytes()})


def proof(**fields: bytes) -> bytes:
    """In the form that is accepted: the fields in order."""
    empty = [[0, b"", b"", b""]]
    whole = {"block_bytes": 1 << 22, "tensor": 0, "layout": b"", "record": empty[0], "parts": empty, "signed": None}
    return sealed("proof", **{name: fields.get(name, packed(value)) for name, value in whole.items()})


def read_proof(data: bytes) -> None:
    decode_proof(data).root()


def large_group(count: int) -> bytes:
    """A proof with parts of its root's record that are not the record's: each says that its group has the most ranks."""
    head = GROUP_HEADER.pack(0, 0)
    parts = [
        take_slice("part", PART_HEADER.pack(bytes(32), rank, MAX_RANKS, 0, 0, 0, 0) + head, []) for rank in range(max(1, count // 100))
    ]
    return decode_proof(samples.proof())._replace(parts=parts).encode()


def read_layout(data: bytes) -> None:
    budget = ParseBudget()
    budget.add_stored(len(data))
    layout = decode_layout(data, "a layout", budget)
    for number in range(2):
        with suppress(StoreError):
            list(tree.leaves(tree.parse(layout, number * str(layout.tree).count("None"))))


def read_entry(data: bytes) -> None:
    decoded = decode_entry(data, "an entry", 1)
    with MemoryTable().batch() as batch:
        fold(decoded, batch)
        view = RefTable(batch)
        for branch in view.branches():
            list(view.history(branch))


def read_checkpoint(data: bytes) -> None:
    with MemoryTable().batch() as batch:
        load(batch, decode_checkpoint(data, "a checkpoint"))


def read_part(data: bytes) -> None:
    for encoded in decode_values(decode_part(data, "a part"), "a part"):
        values.describe(encoded)
        values.decode(encoded)


def read_regions(data: bytes) -> None:
    layout = decode_layout(layout_of(None, [("w", (1 << 40,))], placements={"kinds": ["flat"], "of": bytes(2)}), "a layout")
    decode_regions(layout, data, "a part")


def staged(body: object) -> bytes:
    data = packed(body)
    return data + derived_hash(manifest._CONTEXT, data)


def pickled(code: bytes) -> bytes:
    return b"\x80\x02}(X\x01\x00\x00\x00a" + code + b"u."


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def dcp(code: bytes) -> bytes:
    """The metadata of a folder, with a list of foreign values."""
    return b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(" + text(b"state_dict_metadata") + code + b"ub."


def safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


LONG: Final = "k" * 1000
ROWS: Final[dict[str, Row]] = {
    "record of maps": Row(lambda n: record(x=many(b"\x80")(50 * n)), lambda data: decode_record(data, "x")),
    "record of ranks": Row(lambda n: record(parts=n), lambda data: decode_record(data, "x")),
    "metadata of maps": Row(
        lambda n: record(b"\x81\xa1x" + many(b"\x80")(n)), lambda data: decode_metadata(decode_record(data, "x"), "x"), OBJECT
    ),
    "entry of maps": Row(lambda n: entry(b"\x90", x=many(b"\x80")(n)), read_entry, OBJECT),
    "entry of branches": Row(
        lambda n: entry(packed([{"op": "untag", "critical": True, "name": f"r{at}"} for at in range(n // 2)])), read_entry, OBJECT
    ),
    "entry of a policy": Row(
        lambda n: entry(packed([{"op": "policy", "critical": True, "glob": "*", "rules": {"keep_steps": [[1] * 900] * (n // 300)}}])),
        read_entry,
    ),
    "checkpoint of keys without bytes": Row(lambda n: checkpoint([], bytes(200 * n)), read_checkpoint),
    "checkpoint of long keys that are not there": Row(lambda n: checkpoint([], struct.pack("<I", 1000) * 50 * n), read_checkpoint),
    "checkpoint of foreign rows": Row(lambda n: checkpoint([b"%08d" % at for at in range(n)]), read_checkpoint, 16),
    "part of blocks": Row(blocks, read_part),
    "part of packs": Row(lambda n: part(packs=b"".join(at.to_bytes(16, "little") for at in range(20 * n))), read_part),
    "part of empty values": Row(lambda n: part(values=many(b"\x90")(n)), read_part, OBJECT),
    "part of small tuples": Row(lambda n: part(values=many(packed(["u", []]))(n)), read_part, OBJECT),
    "part of one large set": Row(lambda n: part(values=packed([["e", [["u", [at]] for at in range(n)]]])), read_part, OBJECT),
    "regions": Row(lambda n: struct.pack(f"<{3 + 2 * n}q", 0, 1, n, *[at for pair in range(n) for at in (pair, 1)]), read_regions, 16),
    "footer of a pack": Row(footer, lambda data: decode_footer(PLAIN_HEADER, data, len(PLAIN_HEADER) + len(data), "a pack")),
    "map of moves": Row(moved, lambda data: decode_relocation(data, "x", object_hash(data))),
    "map of moves of maps": Row(
        lambda n: sealed("moved", x=many(b"\x80")(50 * n)), lambda data: decode_relocation(data, "x", object_hash(data))
    ),
    "proof of parts": Row(lambda n: proof(parts=many(packed([0, b"", b"", b""]))(n)), read_proof, OBJECT),
    "proof of parts of a large group": Row(large_group, lambda data: decode_proof(data).verify(), OBJECT),
    "proof of chunks": Row(
        lambda n: proof(record=packed(take_slice("root", bytes(40 * n), [(0, 40 * n)]))),
        read_proof,
        24,  # a batch of 4,096 chunks at most
    ),
    "writer record": Row(lambda n: sealed("writer", x=many(b"\x80")(50 * n)), lambda data: decode_writer_record(data, "x")),
    "layout of holes": Row(lambda n: layout_of(["l", [None] * n]), read_layout, BYTES_PER_STORED),
    "layout of a long key": Row(lambda n: layout_of(["d", [LONG], [["l", [None] * 20 * n]]]), read_layout, BYTES_PER_STORED // 8),
    "layout of one name": Row(lambda n: layout_of(["d", ["a"] * n, [None] * n]), read_layout, BYTES_PER_STORED),
    "layout of meshes": Row(
        lambda n: layout_of(None, mesh=[[[1], bytes(4)]] * n, placements={"kinds": [], "of": b""}), read_layout, OBJECT
    ),
    "layout of storages": Row(
        lambda n: layout_of(None, [(f"w{at}", (0,)) for at in range(n)], storages=[[0, [at], [0]] for at in range(n)]), read_layout, OBJECT
    ),
    "block of zeros": Row(
        lambda n: struct.pack("<I", 1000 * n) + zstandard.ZstdCompressor().compress(bytes(1000 * n)),
        lambda data: decode(Codec.ZSTD, memoryview(data)[4:], int.from_bytes(data[:4], "little"), "x"),
        2 << 14,  # zstd shrinks zeros so far: a block says how large it is, up to 64 MiB
    ),
    "block of zeros that says less": Row(
        lambda n: zstandard.ZstdCompressor().compress(bytes(1000 * n)), lambda data: decode(Codec.ZSTD, memoryview(data), 8, "x")
    ),
    "store.json": Row(lambda n: b'{"a": [' + b"{}," * n + b"{}]}", lambda data: decode_config(data, "x"), OBJECT),
    "staging manifest": Row(lambda n: staged({"version": 1, "x": [{}] * n}), lambda data: manifest.decode_manifest(data, "x"), OBJECT),
    "record of a rank": Row(lambda n: packed({"x": [{}] * n}), lambda data: decode_rank_record(data, "x"), OBJECT),
    "condition": Row(lambda n: b"not " * (n // 20) + b"a > 1", lambda data: condition(data.decode())({"a": 1.0}), 1000),
    "condition of a catalog": Row(lambda n: b"a > 1 and " * (n // 40) + b"a > 1", lambda data: parse_search(data.decode()), 1000),
}
FILES: Final[dict[str, tuple[Callable[[int], bytes], int]]] = {
    "a.pt of empty lists": (lambda n: pickled(b"](" + b"]" * n + b"e"), LEAF),
    "a.pt of nil": (lambda n: pickled(b"](" + text(b"a") + b"N" * n + b"e"), LEAF),
    "a.pt of duplicates": (lambda n: pickled(b"(N" + b"2" * n + b"l"), LEAF),
    "a.pt of keys": (lambda n: pickled(b"}(" + b"".join(b"J" + struct.pack("<i", 7919 * at) + b"N" for at in range(n)) + b"u"), LEAF),
    "a.pt of a long key": (lambda n: pickled(b"}(" + text(LONG.encode()) + b"](" + text(b"a") + b"N" * 20 * n + b"eu"), 100),
    "a.pt of unknown names": (lambda n: pickled(b"](" + b"".join(b"ca\nb%d\n" % at for at in range(n)) + b"e"), LEAF),
    "a.safetensors of tensors": (
        lambda n: safetensors(json.dumps({f"w{at}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for at in range(n)}).encode()),
        OBJECT,
    ),
    "a.safetensors of objects": (lambda n: safetensors(b'{"a": [' + b"{}," * n + b"{}]}"), OBJECT),
    "a folder of DCP": (lambda n: dcp(b"}(" + b"".join(text(b"%d" % at) + b"N" for at in range(n)) + b"u"), LEAF),
}


class Cost(NamedTuple):
    """What an input took."""

    size_bytes: int
    peak_bytes: int
    steps: int


def cost_of(data: bytes, read: Callable[[bytes], object]) -> Cost:
    def call() -> None:
        with suppress(StoreError):
            read(data)

    tracemalloc.start()
    try:
        call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    steps = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal steps
        steps += 1
        return count

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        return count if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return Cost(len(data), peak, steps)


def require_proportion(make: Callable[[int], bytes], read: Callable[[bytes], object], factor: int) -> None:
    with suppress(StoreError):
        read(make(10))  # what is loaded once
    small, large = (cost_of(make(count), read) for count in (ITEMS, 4 * ITEMS))
    assert large.peak_bytes <= factor * large.size_bytes + FREE_BYTES, f"{large.peak_bytes / large.size_bytes:.0f} bytes for each byte"
    assert large.steps <= 5 * small.steps + 2000, f"{small.steps} steps, then {large.steps}"


@pytest.mark.parametrize("kind", ROWS)
def test_what_is_decoded_costs_in_proportion_to_its_bytes(kind: str) -> None:
    row = ROWS[kind]
    require_proportion(row.make, row.read, row.factor)


@pytest.mark.parametrize("kind", FILES)
def test_what_is_imported_costs_in_proportion_to_its_bytes(tmp_path: Path, kind: str) -> None:
    make, factor = FILES[kind]
    name = kind.partition(" ")[0]
    path = tmp_path / ("folder/.metadata" if name == "a" else name)
    path.parent.mkdir(exist_ok=True)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        if name == "a":
            (path.parent / "__0_0.distcp").write_bytes(b"")
        inspect_checkpoint(archive(path, data) if name == "a.pt" else path.parent if name == "a" else path)

    require_proportion(make, read, factor)


@pytest.mark.parametrize("read", [lambda data: decode_kind(data, (0,), None), decode_plan], ids=["kind", "plan"])
def test_what_ranks_send_is_decompressed_as_far_as_a_body_goes(monkeypatch: pytest.MonkeyPatch, read: Callable[[bytes], object]) -> None:
    monkeypatch.setattr(rank_kinds, "MAX_BODY_BYTES", FREE_BYTES // 8)
    assert cost_of(zlib.compress(bytes(64 << 20)), read).peak_bytes < FREE_BYTES


def test_each_decoder_of_stored_bytes_is_in_the_table() -> None:
    """Those of blocks are reached by `decode`, and a layout's tree by `parse`."""
    folders = (Path(PACKAGE) / name for name in ("format", "log", "session/group", "session/staging"))
    found = {
        name for folder in folders for path in folder.glob("*.py") for name in re.findall(r"^def (decode_\w+)", path.read_text(), re.M)
    }
    assert found - {"decode_lead"} == {name for name in globals() if name.startswith("decode_")} - {"decode_rank_record"} | {
        "decode_manifest"
    }
