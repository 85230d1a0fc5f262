"""tsck_read.py, on a small store of which one or two sealed objects are changed under a right seal. An input is the seed of the change."""

import io
import random
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import atheris
from _common import change_bytes, fuzz

sys.path.insert(0, str(Path(__file__).parent.parent / "tensorstore_ck" / "standalone"))
with atheris.instrument_imports(include=["tsck_read"]):
    import tsck_read  # type: ignore[import-not-found]

import msgpack
import torch

import tensorstore_ck as tsck
from tensorstore_ck.common.ids import derived_hash
from tensorstore_ck.format.sealed import KINDS, MAGIC, unpack_body
from tests.format.changed import changed

HERE = Path(tempfile.mkdtemp(prefix="fuzz-standalone-"))
STORE = HERE / "store"
HEADER_BYTES, SEAL_BYTES = 8, 32


def fill() -> dict[Path, bytes]:
    """Makes the store; its sealed objects."""
    with tsck.open(STORE, create=True, cache_dir=HERE / "cache", state_dir=HERE / "state") as store:
        weights = torch.randn(3000)
        for step in (1, 2):
            weights = weights + 0.001
            state = {"w": weights, "v": weights[:10].t(), "x": [1, "a", {"b": (1, 2.0)}], "big": list(range(20000))}
            store.put_snapshot(state, ref="a", step=step, codec="small", metrics={"l": 1.0})
    files = {path: path.read_bytes() for path in sorted(STORE.rglob("*")) if path.is_file()}
    return {path: data for path, data in files.items() if data[:8] != b"TSCKPACK" and data[:4] == MAGIC}


PRISTINE = fill()


def spoil(path: Path, chance: random.Random) -> None:
    old = PRISTINE[path]
    body = unpack_body(memoryview(old)[HEADER_BYTES:-SEAL_BYTES], "an object")
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        body = changed(body, chance, change_bytes)
    try:
        head = old[:HEADER_BYTES] + msgpack.packb(body, use_bin_type=True)
    except (ValueError, OverflowError, TypeError):
        return  # nothing that a file can hold
    kind = next(kind for kind, magic in KINDS.items() if old[4:8] == magic)
    path.chmod(0o644)
    path.write_bytes(head + derived_hash(f"{kind} object", head))


def target(data: bytes) -> None:
    chance = random.Random(data)
    paths = chance.sample(sorted(PRISTINE), chance.choice((1, 1, 2)))
    try:
        for path in paths:
            spoil(path, chance)
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            tsck_read.read_moved.cache_clear()
            for arguments in (["list"], [chance.choice(("a", "a@1", "a~1")), str(HERE / "o.safetensors")]):
                tsck_read.main([str(STORE), *arguments])
        text = out.getvalue() + err.getvalue()
        if any(not char.isprintable() and char != "\n" for char in text):
            raise AssertionError(f"characters that a terminal obeys: {text[:300]!r}")
    finally:
        for path in paths:
            path.write_bytes(PRISTINE[path])


if __name__ == "__main__":
    fuzz("standalone", target, peak_bytes=800 << 20)
