"""The rest of the table of `test_worst_inputs.py`: blocks, small files beside a store, files to import, what peers send; and which decoders
there are, each with its row here or there, or with what else bounds it.
"""

import importlib
import io
import re
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import lz4.block
import numpy as np
import pytest
import zstandard

from tensorstore_ck.backend.cold.owner_marker import MARKER_NAME, OwnerMarker, read_marker
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.staging import upload_journal
from tensorstore_ck.common.foreign_text import parse_json, parse_toml
from tensorstore_ck.format.codec import Codec, decode
from tensorstore_ck.integrations import model_signature
from tensorstore_ck.integrations.importing import inspect_checkpoint
from tensorstore_ck.integrations.trainer.pointers import SnapshotPointer
from tensorstore_ck.maintenance.count_parameters import count_parameters
from tensorstore_ck.session.peers.link import PeerLink, PeerLostError, message_mac
from tests.store.test_worst_inputs import LEAF, OBJECT, PACKAGE, Row, many, pickled, require_proportion, text

pytestmark = pytest.mark.slow

KEY: Final = bytes(32)
tsck_read: Any = importlib.import_module("tensorstore_ck.standalone.tsck_read")


class Gloo:
    """A connection over which all that comes is one stream of bytes."""

    def __init__(self, stream: bytes) -> None:
        self._stream = io.BytesIO(stream)

    def recv(self, tensors: list[Any], peer: int, tag: int) -> "Gloo":
        target = tensors[0].numpy()
        target[:] = np.frombuffer(self._stream.read(len(target)), np.uint8)
        return self

    def wait(self, timeout: object) -> None:
        """It is there."""


def read_record(data: bytes) -> object:
    """As a record of a rank that has the key."""
    pieces = enumerate((len(data).to_bytes(8, "little"), data), 1)
    stream = b"".join(piece + message_mac(KEY, (1, 0, 0, number), memoryview(piece)) for number, piece in pieces)
    try:
        return PeerLink(Gloo(stream), (0, 1), 0, KEY, 1.0).receive_record(1, 0)
    except PeerLostError:
        return None


# --- blocks: the size of the raw bytes, that many bytes (what the extent asks for, or the base), and the stored bytes ---


def constants(item_bytes: int, value: int) -> bytes:
    """The planes of elements that are all alike, however many."""
    return bytes([item_bytes, 0, 1, 0]) + struct.pack("<BBxxI", item_bytes, 2, item_bytes) + value.to_bytes(item_bytes, "little")


def block(stored: bytes | Callable[[int], bytes]) -> Callable[[int], bytes]:
    def make(count: int) -> bytes:
        raw_bytes = 64 * count
        return struct.pack("<I", raw_bytes) + bytes(raw_bytes) + (stored if isinstance(stored, bytes) else stored(raw_bytes))

    return make


def read_block(codec: Codec, decoder: Callable[..., object], data: bytes) -> object:
    (raw_bytes,) = struct.unpack_from("<I", data)
    base, stored = memoryview(data)[4:][:raw_bytes], memoryview(data)[4 + raw_bytes :]
    bases = [base] if codec == Codec.DELTA else [base, base] if codec == Codec.CAST else []
    return decoder(codec, stored, raw_bytes, bases)


def ours(codec: Codec, stored: memoryview, raw_bytes: int, bases: list[memoryview]) -> object:
    return decode(codec, stored, raw_bytes, "a block", bases=bases)


def alone(codec: Codec, stored: memoryview, raw_bytes: int, bases: list[memoryview]) -> object:
    """By the standalone reader."""
    with tsck_read.well_formed("a block"):
        return tsck_read.decode(int(codec), bytes(stored), raw_bytes, [bytes(base) for base in bases])


def difference(form: int, *, sparse: bool = False) -> Callable[[int], bytes]:
    def stored(raw_bytes: int) -> bytes:
        gaps = constants(4, 1) if sparse else b""
        changed = raw_bytes // 4 if sparse else 0
        return struct.pack("<BBBxII", form, 1, 4, changed, len(gaps)) + gaps + constants(4, 2)

    return stored


BLOCKS: Final[dict[str, tuple[Codec, Callable[[int], bytes]]]] = {
    "lz4": (Codec.LZ4, block(lambda size: lz4.block.compress(bytes(size), store_size=False))),
    "zstd": (Codec.ZSTD, block(lambda size: zstandard.ZstdCompressor().compress(bytes(size)))),
    "planes of one value": (Codec.PLANES, block(constants(2, 7))),
    "planes of zeros": (
        Codec.PLANES,
        block(lambda size: bytes([1, 0, 1, 0]) + struct.pack("<BBxxI", 1, 1, len(frame := zstandard.compress(bytes(size)))) + frame),
    ),
    "a difference in all": (Codec.DELTA, block(difference(1))),
    "a sorted difference": (Codec.DELTA, block(difference(3))),
    "a sparse difference": (Codec.DELTA, block(difference(2, sparse=True))),
    "a cast": (Codec.CAST, block(bytes([1]).ljust(8, b"\0"))),
}
SORTING: Final = 20
"""Of an index and a key for each element, to sort them; numpy makes them of eight bytes each."""


# --- small texts and messages ------------------------------------------------------------------------------------------


def objects(count: int) -> bytes:
    return b'{"x": [' + b"{}," * count + b"{}]}"


def read_marker_of(data: bytes) -> object:
    backend = MemoryBackend()
    backend.put(MARKER_NAME, data)
    return read_marker(backend, OwnerMarker("u", "s3://b"))


def statement(count: int) -> bytes:
    files = b",".join(b'{"name":"%d","algorithm":"sha256","digest":"00"}' % at for at in range(count))
    how = b'"predicate":{"serialization":{"method":"files"},"resources":[' + files + b"]}"
    kind = b'"_type":"https://in-toto.io/Statement/v1","predicateType":"https://model_signing/signature/v1.0"'
    return b"{" + kind + b',"subject":[{"digest":{"sha256":"x"}}],' + how + b"}"


def read_statement(data: bytes) -> object:
    try:
        return model_signature._signed_digests(parse_json(data))
    except ValueError:
        return None


def toml(data: bytes) -> object:
    try:
        return parse_toml(data)
    except ValueError:
        return None


def read_alone(data: bytes) -> object:
    try:
        return tsck_read.unpack(data, "an object")
    except tsck_read.ReadError:
        return None


TEXTS: Final[dict[str, Row]] = {
    "record of a peer": Row(lambda n: b"\x81\xa1x" + many(b"\x80")(n), read_record, OBJECT),
    "JSON of a pointer": Row(objects, lambda data: SnapshotPointer.decode(data, "x"), OBJECT),
    "JSON of an upload": Row(objects, lambda data: upload_journal._decode(data, "uploads/x"), OBJECT),
    "JSON of a location": Row(lambda n: objects(n)[: 1 << 16], read_marker_of, OBJECT),
    "JSON of a signature": Row(statement, read_statement, 40),
    "TOML of long keys": Row(lambda n: b"".join(b"a." * 30 + b"k%d = 1\n" % at for at in range(n // 10)), toml, 100),
    "TOML of one long table": Row(lambda n: b"[" + b"a." * 90 + b"b]\n" + b"".join(b"k%d=1\n" % at for at in range(n // 10)), toml, 100),
    "TOML of tables": Row(lambda n: b"[[a]]\n" * n, toml, OBJECT),
    "msgpack of maps, alone": Row(many(b"\x80"), read_alone, OBJECT),
    "msgpack of nested lists, alone": Row(lambda n: b"\x91" * n + b"\xc0", read_alone, OBJECT),
}


# --- files and folders to import ---------------------------------------------------------------------------------------


def records(count: int) -> bytes:
    """A torch file with many empty records."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("a/data.pkl", pickled(b"N"))
        for at in range(count):
            file.writestr(f"a/data/{at}", b"")
    return stream.getvalue()


def legacy(code: bytes) -> bytes:
    """A torch file of before 1.6."""
    head = b"\x80\x02\x8a\x0a" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little") + b".\x80\x02M\xe9\x03."
    return head + b"\x80\x02}X\x0d\x00\x00\x00little_endian\x88s." + code


FILES: Final[dict[str, tuple[str, Callable[[int], bytes], int]]] = {
    "zip records": ("a.pt", records, 40),
    "a legacy file": ("a.pt", lambda n: legacy(pickled(b"](" + text(b"a") + b"N" * n + b"e")), LEAF),
    "an index of files": (
        "m/model.safetensors.index.json",
        lambda n: b'{"weight_map": {' + b",".join(b'"w%d": "f%d.safetensors"' % (at, at) for at in range(n)) + b"}}",
        OBJECT,
    ),
    "an index of one file": (
        "m/model.safetensors.index.json",
        lambda n: b'{"weight_map": {' + b",".join(b'"w%d": "f.safetensors"' % at for at in range(n)) + b"}}",
        OBJECT,
    ),
    "a tracker of Megatron": ("m/latest_checkpointed_iteration.txt", lambda n: b"1" * n, OBJECT),
    "a tag of DeepSpeed": ("m/latest", lambda n: b"a/" * n, OBJECT),
    "a legacy file's storages": ("a.pt", lambda n: legacy(pickled(b"N") + b"\x80\x02](" + b"".join(map(text, [b"1"] * n)) + b"e."), LEAF),
}


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("decoder", [ours, alone])
def test_what_is_decompressed_costs_in_proportion_to_its_raw_bytes(kind: str, decoder: Callable[..., object]) -> None:
    codec, make = BLOCKS[kind]
    require_proportion(make, partial(read_block, codec, decoder), SORTING)


@pytest.mark.parametrize("kind", TEXTS)
def test_what_is_small_costs_in_proportion_to_its_bytes(kind: str) -> None:
    row = TEXTS[kind]
    require_proportion(row.make, row.read, row.factor)


@pytest.mark.parametrize("kind", FILES)
def test_what_is_imported_costs_in_proportion_to_its_bytes(tmp_path: Path, kind: str) -> None:
    name, make, factor = FILES[kind]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        inspect_checkpoint(path if path.parent == tmp_path else path.parent)

    require_proportion(make, read, factor)


def test_a_models_configuration_costs_in_proportion_to_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    require_proportion(objects, lambda data: count_parameters(path) if path.write_bytes(data) else None, OBJECT)


# --- all decoders --------------------------------------------------------------------------------------------------------

ROWS: Final = "the table"
OWN: Final = "this user's, or another rank's of the job"
PARSED: Final = "parsed already, under the bounds of a snapshot"
DECODERS: Final[dict[str, str]] = {
    "backend/cold/locations.py": "a URL in an entry, of 1,024 characters at most",
    "backend/cold/owner_marker.py": ROWS,
    "backend/staging/claims.py": "4,096 bytes",
    "backend/staging/upload_journal.py": ROWS,
    "catalog/branch_health.py": "two rows of the catalog for each store",
    "cli/options.py": OWN,
    "common/folder_identity.py": "the kernel's",
    "common/foreign_text.py": ROWS,
    "engine/write/compare_parent.py": PARSED,
    "format/codec/byte_planes.py": ROWS,
    "format/codec/delta.py": ROWS,
    "format/codec/entropy.py": ROWS,
    "format/codec/registry.py": ROWS,
    "format/layout.py": ROWS,
    "format/part.py": ROWS,
    "format/proof.py": ROWS,
    "format/record.py": ROWS,
    "format/relocation.py": ROWS,
    "format/sealed.py": ROWS,
    "format/store_config.py": ROWS,
    "format/values.py": ROWS,
    "format/writer_record.py": ROWS,
    "gc/part_summary.py": OWN,
    "integrations/deepspeed/engine.py": OWN,
    "integrations/exporting/followed_folder.py": OWN,
    "integrations/exporting/model_folder.py": "a file of the model that the user names",
    "integrations/exporting/torch_zip_template.py": "torch's, which wrote it just now",
    "integrations/hf/weights.py": "a file of the model that is trained",
    "integrations/hf/trainer.py": OWN,
    "integrations/hf/trainer_values.py": OWN,
    "integrations/importing/dcp_folder.py": ROWS,
    "integrations/importing/dcp_safetensors.py": ROWS,
    "integrations/importing/megatron_folder.py": ROWS,
    "integrations/importing/safe_unpickler.py": ROWS,
    "integrations/importing/safetensors_file.py": ROWS,
    "integrations/importing/sharded_index.py": ROWS,
    "integrations/importing/torch_file.py": ROWS,
    "integrations/importing/trainer_folder.py": ROWS,
    "integrations/importing/zip_directory.py": ROWS,
    "integrations/model_signature.py": ROWS,
    "integrations/ray/reporting.py": OWN,
    "integrations/titan/snapshot_manager.py": OWN,
    "integrations/trainer/pointers.py": ROWS,
    "integrations/weight_names/names_file.py": ROWS,
    "log/checkpoint.py": ROWS,
    "log/entry.py": ROWS,
    "log/field_checks.py": "a row of a checkpoint, which has its bounds",
    "log/head_file.py": "4,096 bytes",
    "log/trust_file.py": ROWS,
    "maintenance/count_parameters.py": ROWS,
    "maintenance/fsck/rebuild_parts.py": PARSED,
    "session/group/channel.py": ROWS,
    "session/group/rank_kinds.py": ROWS,
    "session/group/rank_save.py": OWN,
    "session/peers/link.py": ROWS,
    "session/staging/manifest.py": ROWS,
    "standalone/tsck_read.py": ROWS,
    "state/tensor_table.py": "columns that it made itself",
    "training/checkpointing/checkpointer.py": OWN,
    "training/resume_search.py": OWN,
    "training/training_state.py": PARSED,
    "ui/actions.py": "a form of 64 KiB and 20 fields",
    "ui/activity.py": "a page of the catalog's rows",
    "ui/health.py": "the catalog's rows of policies",
}
"""Module that decodes something -> what bounds that."""
CALLS: Final = r"\b(parse_json|parse_toml|unpack_body|unpackb|safe_unpickle|unpack_from|decompress|decompressobj|parse_qsl|unseal)\("


def test_all_decoders_are_known() -> None:
    paths = Path(PACKAGE).rglob("*.py")
    assert {str(path.relative_to(PACKAGE)) for path in paths if re.search(CALLS, path.read_text(encoding="utf-8"))} == DECODERS.keys()
