"""Writes the seeds under fuzz/corpus from real objects: `python -m fuzz.make_corpus` in the repository's root."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tensorstore_ck import values
from tensorstore_ck.config import new_config
from tensorstore_ck.envelope import HEADER_BYTES
from tensorstore_ck.ids import DIGEST_BYTES
from tensorstore_ck.layout import Layout, TensorSpec
from tensorstore_ck.log.entry import genesis_hash, seal_entry
from tensorstore_ck.part import encode_values
from tensorstore_ck.record import encode_metadata
from tests.format import samples

FOLDER = Path(__file__).parent / "corpus"


def seeds() -> Iterator[tuple[str, bytes]]:
    """(target, input) of all seeds."""
    for kind, sample in samples.SEALED.items():
        yield kind, body(sample.sample)
    yield "layout", body(Layout([], None).encode())
    yield "layout", body(Layout([TensorSpec("x", "float32", 4, (1 << 30,))], ["l", [["t", 0, 1], None]]).encode())
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
    for exclusive in (True, False):
        config = replace(new_config(exclusive_create=exclusive), uuid="12345678-1234-5678-1234-567812345678")
        yield "config", config.encode()


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
