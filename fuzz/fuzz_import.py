"""Foreign files: a pickle alone, in torch's archive, in a legacy torch file; a safetensors file; the metadata of a DCP folder."""

import io
import random
import struct
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

import atheris
from _common import fuzz

with atheris.instrument_imports(include=["tensorstore_ck.integrations.importing"]):
    from tensorstore_ck.errors import StoreError
    from tensorstore_ck.integrations.importing.detect_format import find_state
    from tensorstore_ck.integrations.importing.mapped_files import Files
    from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
    from tensorstore_ck.integrations.importing.resolve_placeholders import resolve_placeholders

FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-import-"))
LEGACY = (
    b"\x80\x02\x8a\x0a"
    + (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
    + b".\x80\x02M\xe9\x03.\x80\x02}X\x0d\x00\x00\x00little_endian\x88s."
)
NAMES = (
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch._tensor _rebuild_from_type_v2", "torch FloatStorage"),
    *("torch.storage UntypedStorage", "torch Size", "torch device", "torch float32", "torch Tensor", "torch.nn.parameter Parameter"),
    *("collections OrderedDict", "collections defaultdict", "collections Counter", "_codecs encode", "builtins set", "builtins frozenset"),
    *("numpy.core.multiarray _reconstruct", "numpy.core.multiarray scalar", "numpy dtype", "numpy ndarray", "builtins bytearray"),
    *("pathlib PosixPath", "argparse Namespace", "omegaconf.dictconfig DictConfig", "megatron.core.enums ModelType", "os system"),
    *("torch.distributed.checkpoint.metadata Metadata", "torch.distributed.checkpoint.metadata TensorStorageMetadata"),
)
SNIPPETS = [
    *(f"c{name.replace(' ', chr(10))}\n".encode() for name in NAMES),
    *(
        b")R",
        b"R",
        b"b",
        b"(",
        b"t",
        b"l",
        b"}",
        b"]",
        b"u",
        b"e",
        b"s",
        b"a",
        b"\x8f",
        b"\x90",
        b"\x91",
        b"q\x00",
        b"h\x00",
        b"q\x01",
        b"h\x01",
    ),
    *(
        b"2",
        b"0",
        b"1",
        b"K\x01",
        b"J\xff\xff\xff\xff",
        b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
        b"N",
        b"\x88",
        b"\x85",
        b"\x86",
        b"\x87",
        b"\x81",
        b"\x93",
    ),
    *(b"G" + struct.pack(">d", float("nan")), b"X\x03\x00\x00\x00abc", b"C\x02\x00\x01", b"."),
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x10tQ",
]


def archive(pickle: bytes) -> bytes:
    """What torch.save writes, with one storage."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as made:
        made.writestr("a/data.pkl", pickle)
        made.writestr("a/byteorder", "little")
        made.writestr("a/data/0", bytes(64))
        made.writestr("a/version", "3\n")
    return stream.getvalue()


def look(name: str, data: bytes, *, at: str = "") -> None:
    path = FOLDER / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    known = PickleAllowlist()
    with suppress(StoreError), Files() as files:
        where = str(FOLDER / (at or name))
        found = find_state(files, where, known)
        resolve_placeholders(found.state, (), found.unknown, where, known.parsed_bytes)


def target(data: bytes) -> None:
    kind, body = (data[0] % 5 if data else 0), data[1:]
    if kind == 0:
        look("a.pt", body)
    elif kind == 1:
        look("b.pt", archive(body))
    elif kind == 2:
        look("c.safetensors", struct.pack("<Q", max(0, len(body) - 16)) + body)
    elif kind == 3:
        (FOLDER / "dcp").mkdir(exist_ok=True)
        (FOLDER / "dcp" / "__0_0.distcp").write_bytes(archive(b"\x80\x02K\x01."))
        look("dcp/.metadata", body, at="dcp")
    else:
        look("d.pt", LEGACY + body)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Puts a few opcodes somewhere, or changes any bytes."""
    chance = random.Random(seed)
    if chance.random() < 0.6:
        at = chance.randrange(1, len(data) + 1) if data else 0
        piece = b"".join(chance.choices(SNIPPETS, k=chance.randrange(1, 4)))
        spliced = data[:at] + piece + data[at + (len(piece) if chance.random() < 0.3 else 0) :]
        if len(spliced) <= max_size:
            return spliced
    return bytes(atheris.Mutate(data[:max_size], max_size))


if __name__ == "__main__":
    fuzz("import", target, mutate, peak_bytes=64 << 20)
