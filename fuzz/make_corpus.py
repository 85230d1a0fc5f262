"""Writes the seeds under fuzz/corpus from real objects: `python -m fuzz.make_corpus` in the repository's root."""

import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

import tensorstore_ck as tsck
from tensorstore_ck.catalog import Catalog
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.ids import DIGEST_BYTES
from tensorstore_ck.format import values
from tensorstore_ck.format.codec import Elements, Encoded, Encoder
from tensorstore_ck.format.layout import Layout, TensorSpec
from tensorstore_ck.format.part import encode_values
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.format.ref_statement import LogName, RefStatement
from tensorstore_ck.format.sealed import HEADER_BYTES, pack_body
from tensorstore_ck.format.store_config import new_config
from tensorstore_ck.log.entry import genesis_hash, seal_entry
from tensorstore_ck.log.operations import Op
from tensorstore_ck.session.staging.manifest import Manifest
from tests.format import samples

FOLDER = Path(__file__).parent / "corpus"


def seeds() -> Iterator[tuple[str, bytes]]:
    """(target, input) of all seeds."""
    for form, sample in samples.SEALED.items():
        yield samples.kind_of(form), body(sample.sample)
    yield "layout", body(Layout([], None).encoded)
    yield "layout", body(Layout([TensorSpec("x", "float32", 4, (1 << 30,))], ["l", [["t", 0, 1], None]]).encoded)
    part = samples.part()
    everything = [values.encode(value, "x") for value in (frozenset({1.5}), "\ud800", bytearray(b"x"), tuple(range(40)), (0.5,) * 40)]
    yield "part", body(part._replace(values=encode_values([*everything, ["b", "m", 1]])).encode())
    yield "part", body(part._replace(values=b"\x90", inline=b"", extents=part.extents[:3], base_ids=b"").encode())
    yield "snapshot", body(samples.record()._replace(step=None, parent=None, metadata=encode_metadata(None), metrics={}).encode())
    for op in samples.operations():
        yield "log", body(seal_entry(1, genesis_hash(bytes(16)), [op], write_id=bytes(16), time_ns=0, actor="")[0])
    yield "pack", samples.pack()
    yield "pack", samples.pack_of([])
    yield "pack", samples.pack_of([b"raw" * 9, bytes(range(256))], compress=False)
    yield "import", b"\x01\x80\x02}q\x00X\x01\x00\x00\x00aK\x01s."
    yield "standalone", b"seed"
    yield "store", b"seed"
    yield from codecs()
    for exclusive in (True, False):
        config = replace(new_config(exclusive_create=exclusive), uuid="12345678-1234-5678-1234-567812345678")
        yield "config", config.encode()
    for ops in (
        [Op.relocate(samples.ULID, samples.ULID, samples.ROOT, [samples.ULID])],
        [Op.set_location([samples.ULID], "s3://bucket/cold/uuid")],
    ):
        yield "places", body(seal_entry(1, genesis_hash(bytes(16)), ops, write_id=bytes(16), time_ns=0, actor="")[0])
    yield "manifest", Manifest(samples.ULID, "runs/a", 3, 0, 1, ["parts/aa/b"], 17, None).encode()[:-DIGEST_BYTES]
    yield "peer", pack_body({"offer": 1, "sizes": {"a": 3}, "manifest": b"x" * 40})
    for path in ("", "runs/a", "runs/a@1/model.safetensors", "runs/a@", "best/snapshot.json", "runs"):
        yield "path", path.encode()
    yield "catalog", catalog() + b"\nstep > 3 and loss < 2.5 or tag = 'best'"
    statement = RefStatement(LogName(bytes(16), "log"), ref="runs/a", root=samples.ROOT, step=3, number=1, time_ns=1)
    signed = Op.sign(statement, bytes(32), bytes(64))
    yield "log", body(seal_entry(1, genesis_hash(bytes(16)), [signed], write_id=bytes(16), time_ns=0, actor="")[0])
    weights = np.random.default_rng(0).normal(size=1 << 11).astype("<f4").tobytes()
    planes = Encoder("fast").encode_tensor(weights, Elements(4, is_float=True))  # exponents make a Huffman code
    yield "codec", bytes([planes.codec]) + len(weights).to_bytes(2, "little") + b"\0" + b"".join(planes.pieces)
    for tensor in range(3):
        yield "proof", body(samples.proof(tensor))


def catalog() -> bytes:
    """A catalog of one store with one snapshot."""
    with tempfile.TemporaryDirectory() as folder:
        with tsck.open(f"{folder}/s", create=True) as store, Catalog(f"{folder}/catalog.db") as made:
            store.put_snapshot({"step": 1}, ref="runs/a", step=1, metrics={"loss": 2.0})
            made.sync(store)
        return Path(folder, "catalog.db").read_bytes()


def codecs() -> Iterator[tuple[str, bytes]]:
    """Blocks of all codecs, as `fuzz_codec` takes them."""
    noise = random.Random(0).randbytes(1 << 12)
    base = memoryview(noise)
    moved = bytearray(noise)
    moved[100:104] = b"\1\2\3\4"

    def delta_of(raw: Buffer, elements: Elements) -> Encoded | None:
        delta = encoder.encode_delta(raw, base, elements)
        return None if delta is None else delta.encoded

    encoder, floats = Encoder("small"), Elements(4, is_float=True)
    near = np.frombuffer(noise, "<u4") % 251 + 1
    dense = memoryview((np.frombuffer(noise, "<u4") + near).tobytes())
    halves = memoryview(np.zeros(256, "<u2").tobytes())
    blocks = [
        (encoder.encode_tensor(memoryview(near.tobytes()), floats), len(noise), 0),
        (encoder.encode_tensor(memoryview(bytes(64)), Elements(8, is_float=False)), 64, 0),
        (delta_of(moved, floats), len(noise), 1),
        (delta_of(dense, floats), len(noise), 1),
        (delta_of(dense, Elements(4, is_float=False)), len(noise), 1),
        (encoder.encode_cast(halves, [memoryview(bytes(1024))], "bfloat16"), len(halves), 1),
        (encoder.encode_opaque(b"text" * 99), 396, 0),
    ]
    for encoded, raw_bytes, count in blocks:
        assert encoded is not None
        yield "codec", bytes([encoded.codec]) + raw_bytes.to_bytes(2, "little") + bytes([count]) + b"".join(encoded.pieces)


def body(sealed: bytes) -> bytes:
    """What an input for `fuzz_sealed` is."""
    return sealed[HEADER_BYTES:-DIGEST_BYTES]


def main() -> None:
    """Replaces all seeds."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for number, (name, data) in enumerate(seeds()):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        (FOLDER / name / f"seed-{number:02d}").write_bytes(data)


if __name__ == "__main__":
    main()
