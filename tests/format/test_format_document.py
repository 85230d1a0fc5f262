"""FORMAT.md and the code say the same."""

import re
from pathlib import Path

import numpy as np

import tensorstore_ck
from tensorstore_ck.chunker import content_defined
from tensorstore_ck.format import layout, pack
from tensorstore_ck.format.block_assignment import MIN_RUN_BYTES
from tensorstore_ck.format.codec import Codec
from tensorstore_ck.format.part import EXTENT_DTYPE
from tensorstore_ck.format.relocation import RELOCATION_DTYPE
from tensorstore_ck.format.sealed import FORMAT_VERSION, KINDS, MAGIC, MAX_DEPTH, MAX_ITEMS, MAX_OBJECT_BYTES
from tensorstore_ck.format.store_config import BLOCK_BYTES, CONFIG_NAME, STORE_FORMAT
from tensorstore_ck.log.entry import MAX_ENTRY_BYTES
from tensorstore_ck.log.follow import MAX_TAIL_ENTRIES, MIN_TAIL_ENTRIES
from tensorstore_ck.log.operations import SCHEMA

TEXT = (Path(tensorstore_ck.__file__).parent / "FORMAT.md").read_text()


def table(header: str) -> list[list[str]]:
    """The rows below a table's header line."""
    lines = TEXT.splitlines()
    start = lines.index(header) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_kinds_and_limits() -> None:
    assert {kind: code.strip("`").encode() for kind, code in table("| kind | four bytes |")} == KINDS
    assert f'"{MAGIC.decode()}"' in TEXT
    assert f"the format version: {FORMAT_VERSION}" in TEXT
    assert f"Format of a store, version {STORE_FORMAT}" in TEXT
    assert f"at most {MAX_DEPTH} deep" in TEXT
    assert f"at most {MAX_OBJECT_BYTES >> 20} MiB" in TEXT
    assert MAX_ITEMS == 1 << 24
    assert "2^24 items" in TEXT
    assert f"`{CONFIG_NAME}`" in TEXT
    assert f"Values of more than {layout.INLINE_VALUE_BYTES >> 10} KiB are blobs" in TEXT
    assert f"tensor of up to {layout.INLINE_TENSOR_BYTES:,} bytes" in TEXT
    assert f"`block_bytes`, {BLOCK_BYTES >> 20} MiB" in TEXT
    assert f"at most {pack.MAX_BLOCK_BYTES >> 20} MiB" in TEXT
    assert f"T // {MIN_RUN_BYTES >> 20} MiB" in TEXT
    assert layout.MAX_RANKS == layout.MAX_REGIONS == 1 << 20
    assert "more than 2^20 ranks" in TEXT
    assert f"more than {layout.MAX_MESH_DIMS} mesh dims" in TEXT
    assert f"more than {layout.MAX_BOXES:,} boxes" in TEXT
    assert f"{layout.MAX_ALL_BOXES:,} and {layout.BOXES_A_TENSOR} for each tensor" in TEXT
    assert pack.PACK_LIMIT_BYTES == 1 << 30
    assert pack.MAX_ENTRIES == 1 << 22
    assert MAX_ENTRY_BYTES == 1 << 20
    assert f"after {MIN_TAIL_ENTRIES} entries at least and {MAX_TAIL_ENTRIES:,} at most" in TEXT
    assert f"average {content_defined.OPAQUE_AVERAGE_BYTES >> 20} MiB, from {content_defined.OPAQUE_MIN_BYTES >> 10} KiB" in TEXT
    assert f"to {content_defined.OPAQUE_MAX_BYTES >> 20} MiB" in TEXT


def check_dtype(dtype: np.dtype[np.void], rows: list[list[str]]) -> None:
    documented = [(name, int(size)) for name, size, *_ in rows if "+" not in size]
    assert dtype.names is not None
    fields = [(name, dtype[name].itemsize) for name in dtype.names if name not in ("reserved", "pad")]
    assert [row for row in documented if row[0] in dict(fields)] == fields


def test_rows() -> None:
    check_dtype(pack.ENTRY_DTYPE, table("| entry | bytes | |"))
    check_dtype(EXTENT_DTYPE, table("| extent | bytes | |"))
    check_dtype(RELOCATION_DTYPE, table("| moved row | bytes | |"))
    assert pack.ENTRY_DTYPE.itemsize == 64
    assert RELOCATION_DTYPE.itemsize == 32
    assert EXTENT_DTYPE.itemsize == 32
    assert pack.BASE_DTYPE.itemsize == 4 + 4 + 32
    assert pack.HEADER.size == pack.TRAILER.size == 64
    assert "header (64)" in TEXT
    assert "trailer (64)" in TEXT
    rows = table("| header | bytes | | trailer | bytes |")
    assert sum(int(row[1]) for row in rows) == pack.HEADER.size
    assert sum(int(row[4]) for row in rows if row[4]) == pack.TRAILER.size
    assert f"`{pack.PACK_MAGIC.decode()}`" in TEXT
    assert f"`{pack.FOOTER_MAGIC.decode()}`" in TEXT


def test_codecs_and_operations() -> None:
    documented = {name: number for name, number, _ in table("| codec | number | stored bytes |")}
    for codec in Codec:
        assert documented.pop(codec.name.lower()) == str(codec.value)
    assert not documented
    operations: dict[str, set[str]] = {}
    for names, _, fields in table("| op | critical | fields |"):
        for name in re.findall(r"`(\w+)`", names):
            operations[name] = set(re.findall(r"`(\w+)`", fields)) - {"bad", "damaged", "drift", "unpin"}
    assert operations == {name: set(fields) for name, fields in SCHEMA.items()}
