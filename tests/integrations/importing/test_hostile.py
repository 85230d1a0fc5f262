"""Pickles that want to run code, to be endless, or to be believed: nothing is run, and nothing is imported."""

import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.integrations.importing import import_checkpoint
from tensorstore_ck.integrations.importing.safe_unpickler import MAX_PICKLE_BYTES
from tests.integrations.importing.conftest import Refuse, archive

Reduced = tuple[Any, ...]


class Does:
    """Pickles as a call."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Reduced:
        return self.reduced


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module: str, what: str) -> bytes:
    return f"c{module}\n{what}\n".encode()


def storage(kind: str = "FloatStorage", key: str = "0", count: bytes = b"K\x02") -> bytes:
    return b"(" + text("storage") + name("torch", kind) + text(key) + text("cpu") + count + b"tQ"


def tensor(*, held: bytes | None = None, offset: bytes = b"K\x00", shape: bytes = b"K\x02\x85", strides: bytes = b"K\x01\x85") -> bytes:
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + (held or storage()) + offset + shape + strides + b"\x89)tR"


def node(value: bytes, number: int = 0) -> bytes:
    return name("omegaconf.nodes", "AnyNode") + b")Rq" + bytes([number]) + b"}" + text("_val") + value + b"sb"


SYSTEM = name("os", "system")
CALLS: dict[str, Any] = {
    "os.system": Does(os.system, ("touch hacked",)),
    "eval": Does(eval, ("open('hacked', 'w')",)),
    "exec": Does(exec, ("open('hacked', 'w')",)),
    "open": Does(open, ("hacked", "w")),
    "getattr": Does(getattr, (Does(__import__, ("os",)), "system")),
    "import": Does(__import__, ("antigravity",)),
    "torch.load": Does(torch.load, ("hacked",)),
    "torch.storage": Does(torch.storage._load_from_bytes, (pickle.dumps(1),)),
    "torch.save": Does(torch.save, (1, "hacked")),
    "numpy.load": Does(__import__("numpy").load, ("hacked", None, True)),
    "state": Does(Does, (1,), {"x": Does(os.system, ("touch hacked",))}),
    "in a list": [1, {"x": (Does(os.system, ("touch hacked",)),)}],
    "as a key": {Does(os.system, ("touch hacked",)): 1},
    "class": Does(type, ("X", (), {})),
    "bytes": Does(bytes, (10**12,)),
    "bytearray": Does(bytearray, (10**12,)),
    "range": Does(list, (range(10**12),)),
    "str": Does(str, (b"x", "rot13")),
}


@pytest.mark.parametrize(("call", "is_zip"), [*((call, True) for call in CALLS), ("os.system", False), ("in a list", False)])
def test_calls(refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, *, is_zip: bool) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": CALLS[call]}, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    refuse(tmp_path / "a.pt")
    assert not (tmp_path / "hacked").exists()


ENDLESS = b"]q\x00" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(59))
CODES: dict[str, bytes] = {
    "called and thrown away": SYSTEM + text("touch hacked") + b"\x85R0}.",
    "called behind the result": b"}." + SYSTEM + text("touch hacked") + b"\x85R.",
    "called in what is swallowed": name("own", "Thing") + b"(" + SYSTEM + text("touch hacked") + b"\x85RtR0}.",
    "a function as a value": b"}" + text("f") + name("torch._utils", "_rebuild_tensor_v2") + b"s.",
    "a storage as a value": b"}" + text("f") + storage() + b"s.",
    "a class as a value": b"}" + text("f") + name("builtins", "dict") + b"s.",
    "a type of storage as a value": b"}" + text("f") + name("torch", "FloatStorage") + b"s.",
    "attributes through dots": name("torch", "os.system") + text("touch hacked") + b"\x85R.",
    "by its two names": b"\x80\x04" + text("os") + text("system") + b"\x93" + text("touch hacked") + b"\x85R.",
    "a name that is none": b"\x80\x04K\x01K\x02\x93.",
    "an extension": b"\x82\x01.",
    "an instance": b"(ios\nsystem\n.",
    "a text opcode": b"I10\n.",
    "a buffer from elsewhere": b"\x97.",
    "an unknown persistent id": text("x") + b"Q.",
    "a persistent id of something else": b"(" + text("module") + b"tQ.",
    "the state of a list": b"]}b.",
    "the state of a tensor": tensor() + b"}b.",
    "the state of a function": name("torch._utils", "_rebuild_tensor") + b"}b.",
    "attributes of an OrderedDict": name("collections", "OrderedDict") + b")R}" + text("__class__") + b"K\x01sb.",
    "items of a list": b"]K\x01K\x02s.",
    "items appended to a dict": b"}K\x01a.",
    "a key without a value": b"}(K\x01u.",
    "a list as a key": b"}]K\x01s.",
    "a key that nests": b"}" + b")" + b"\x85" * 30_000 + b"K\x01s.",
    "an element that nests": b"\x8f()" + b"\x85" * 30_000 + b"\x90.",
    "nothing": b".",
    "two results": b"NN.",
    "an open mark": b"(N.",
    "no mark": b"t.",
    "too few for a tuple": b"N\x87.",
    "no end": b"N",
    "an unknown memo": b"h\x07.",
    "nested": b"]" * 200 + b"a" * 199 + b".",
    "nested without end": b"]" * 30_000 + b"a" * 29_999 + b".",
    "tuples without end": b")" + b"\x85" * 30_000 + b".",
    "itself": b"]q\x00h\x00a.",
    "itself in a dict": b"}q\x00" + text("x") + b"h\x00s.",
    "endless by its memo": ENDLESS + b".",
    "marks": b"(" * 100_000 + b".",
    "a text of 4 GB": b"X\xff\xff\xff\xffabc.",
    "a text of 2**63": b"\x8d" + b"\xff" * 8 + b".",
    "bytes of 2**63": b"\x8e" + b"\xff" * 7 + b"\x7f.",
    "a bytearray of 2**40": b"\x96" + struct.pack("<Q", 1 << 40) + b".",
    "an integer of 2 GB": b"\x8b\xff\xff\xff\x7f1.",
    "a negative integer": b"\x8b\xff\xff\xff\xff1.",
    "an integer of 5 kB": b"\x8b" + struct.pack("<i", 5000) + b"\x7f" * 5000 + b".",
    "bad text": b"X\x02\0\0\0\xff\xfe.",
    "a name without an end": b"c" + b"x" * 5000,
    "a tensor beyond its storage": tensor(shape=b"K\x03\x85") + b".",
    "a tensor of 10**12": tensor(shape=b"\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85") + b".",
    "a tensor of 10**12 without strides": tensor(shape=b"\x8a\x06\x00\x10\xa5\xd4\xe8\x00K\x7f\x86", strides=b"K\x00K\x00\x86") + b".",
    "a tensor of 2**62 x 4": tensor(shape=b"\x8a\x08" + struct.pack("<q", 1 << 62) + b"K\x04\x86", strides=b"K\x00K\x00\x86") + b".",
    "a tensor of nothing by much": tensor(shape=b"K\x00\x8a\x08" + struct.pack("<q", 1 << 62) + b"\x86", strides=b"K\x00K\x00\x86") + b".",
    "a negative shape": tensor(shape=b"J\xff\xff\xff\xff\x85") + b".",
    "a negative stride": tensor(offset=b"K\x01", strides=b"J\xff\xff\xff\xff\x85") + b".",
    "a negative offset": tensor(offset=b"J\xff\xff\xff\xff") + b".",
    "a huge stride": tensor(shape=b"K\x01\x85", strides=b"\x8a\x0a" + b"\x7f" * 10 + b"\x85") + b".",
    "a shape of texts": tensor(shape=text("x") + b"\x85") + b".",
    "a shape that is none": tensor(shape=b"K\x02") + b".",
    "more strides than dims": tensor(strides=b"K\x01K\x01\x86") + b".",
    "a tensor of a tensor": tensor(held=tensor()) + b".",
    "no such storage": tensor(held=storage(key="1")) + b".",
    "a storage by another path": tensor(held=storage(key="../data.pkl")) + b".",
    "a storage of another size": tensor(held=storage(count=b"K\x03")) + b".",
    "a storage of negative size": tensor(held=storage(count=b"J\xff\xff\xff\xff")) + b".",
    "a storage of an unknown kind": tensor(held=storage(kind="EvilStorage")) + b".",
    "a parameter of an integer": name("torch._utils", "_rebuild_parameter") + tensor(held=storage("IntStorage")) + b"\x88N\x87R.",
    "a parameter of nothing": name("torch._utils", "_rebuild_parameter") + b"N\x88N\x87R.",
    "too few arguments": name("torch._utils", "_rebuild_parameter") + b")R.",
    "a size of texts": name("torch", "Size") + text("x") + b"\x85\x85R.",
    "a device that is none": name("torch", "device") + text("evil") + b"\x85R.",
    "a dtype of objects": name("numpy", "dtype") + text("O8") + b"\x89\x88\x87R.",
    "a dtype of fields": name("numpy", "dtype") + text("i4,i4") + b"\x89\x88\x87R.",
    "a config of itself": node(b"h\x00") + b".",
    "configs of each other": node(node(node(b"h\x00", 2), 1)) + b".",
    "a config that is not finished": name("omegaconf.nodes", "AnyNode") + b")R.",
    "a config of something else": name("omegaconf.dictconfig", "DictConfig") + b")R}" + text("_content") + b"]sb.",
    "called in a config": node(SYSTEM + text("touch hacked") + b"\x85R") + b".",
    "an encoding": name("_codecs", "encode") + text("x") + text("zip") + b"\x86R.",
}


@pytest.mark.parametrize("code", CODES)
def test_codes(refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.chdir(tmp_path)
    refuse(archive(tmp_path / "a.pt", CODES[code], {"data/0": bytes(8)}))
    assert not (tmp_path / "hacked").exists()


def test_the_pieces_of_these_codes_are_sound(store: tsck.Store, tmp_path: Path) -> None:
    import_checkpoint(store, archive(tmp_path / "a.pt", tensor() + b".", {"data/0": torch.ones(2).numpy().tobytes()}), ref="x")
    assert torch.equal(store.checkout("x"), torch.ones(2))


# --- archives -----------------------------------------------------------------------------------------------------------

TENSOR = tensor() + b"."


def test_compressed_records(refuse: Refuse, tmp_path: Path) -> None:
    code = tensor(held=storage(count=b"J" + struct.pack("<i", 1 << 20))) + b"."
    path = archive(tmp_path / "a.pt", code, {"data/0": bytes(1 << 22)}, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 16
    assert "compressed" in refuse(path, tsck.UnsupportedValueError)


def test_a_plain_tensor_over_a_quantized_storage(refuse: Refuse, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", tensor(held=storage("QUInt8Storage")) + b".", {"data/0": bytes(2)})
    assert "without a scale" in refuse(path, tsck.CorruptObjectError)


def test_a_record_twice(refuse: Refuse, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        archive(tmp_path / "a.pt", TENSOR, {"data/0": bytes(8), "data.pkl": TENSOR})
    assert "twice" in refuse(tmp_path / "a.pt", tsck.CorruptObjectError)


def test_other_archives(refuse: Refuse, tmp_path: Path) -> None:
    archive(tmp_path / "a.pt", TENSOR, {"data/0": bytes(8), "constants.pkl": b"N."})
    assert "TorchScript" in refuse(tmp_path / "a.pt", tsck.UnsupportedValueError)
    archive(tmp_path / "a.pt", TENSOR, {"data/0": bytes(8), "byteorder": b"big"})
    assert "big-endian" in refuse(tmp_path / "a.pt", tsck.UnsupportedValueError)
    archive(tmp_path / "a.pt", TENSOR, {"data/0": bytes(8), "../../etc/x": b""})
    archive(tmp_path / "b.pt", TENSOR, {"data/0": bytes(8)})
    (tmp_path / "a.pt").write_bytes((tmp_path / "b.pt").read_bytes() + b"more")
    assert "something follows it" in refuse(tmp_path / "a.pt", tsck.CorruptObjectError)
    (tmp_path / "a.pt").write_bytes(b"PK\x03\x04more" + (tmp_path / "b.pt").read_bytes())
    refuse(tmp_path / "a.pt")


def rewritten(path: Path, name: str, at: int, form: str, *values: int) -> None:
    """Changes fields of a record in the directory."""
    data = bytearray(path.read_bytes())
    start = data.rindex(name.encode()) - 46
    assert data[start : start + 4] == b"PK\x01\x02"
    struct.pack_into(form, data, start + at, *values)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("at", "form", "values"),
    [
        (20, "<2I", (10**9, 10**9)),
        (20, "<2I", (16, 8)),
        (20, "<2I", (0xFFFFFFFF, 0xFFFFFFFF)),
        (42, "<I", (0,)),
        (42, "<I", (10**9,)),
        (42, "<I", (0xFFFFFFFF,)),
        (28, "<H", (0xFFFF,)),
        (30, "<H", (0xFFFF,)),
        (8, "<H", (1,)),
        (10, "<H", (8,)),
    ],
)
def test_directories_that_lie(refuse: Refuse, tmp_path: Path, at: int, form: str, values: tuple[int, ...]) -> None:
    archive(tmp_path / "a.pt", TENSOR, {"data/0": bytes(8)})
    rewritten(tmp_path / "a.pt", "a/data/0", at, form, *values)
    refuse(tmp_path / "a.pt", tsck.CorruptObjectError)


def test_records_that_overlap(refuse: Refuse, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", TENSOR, {"data/0": bytes(8), "data/1": bytes(8)})
    with zipfile.ZipFile(path) as file:
        rewritten(path, "a/data/1", 42, "<I", file.getinfo("a/data/0").header_offset)
    assert "overlap" in refuse(path, tsck.CorruptObjectError)


@pytest.mark.parametrize(("at", "form", "value"), [(8, "<2H", 0xFFFF), (8, "<2H", 3), (12, "<I", 10**9), (16, "<I", 10**9), (20, "<H", 9)])
def test_counts_that_lie(refuse: Refuse, tmp_path: Path, at: int, form: str, value: int) -> None:
    data = bytearray(archive(tmp_path / "a.pt", TENSOR, {"data/0": bytes(8)}).read_bytes())
    struct.pack_into(form, data, len(data) - 22 + at, *(value,) * (2 if form == "<2H" else 1))
    (tmp_path / "a.pt").write_bytes(data)
    refuse(tmp_path / "a.pt", tsck.CorruptObjectError)


def test_enormous_pickles_are_not_begun(refuse: Refuse, tmp_path: Path) -> None:
    archive(tmp_path / "a.pt", TENSOR, {"data/0": bytes(8)})
    rewritten(tmp_path / "a.pt", "a/data.pkl", 20, "<2I", MAX_PICKLE_BYTES + 1, MAX_PICKLE_BYTES + 1)
    with (tmp_path / "a.pt").open("rb") as file:
        assert len(file.read()) < 1000
    refuse(tmp_path / "a.pt", tsck.CorruptObjectError)


# --- before torch 1.6 ---------------------------------------------------------------------------------------------------


def legacy(path: Path, *, code: bytes = TENSOR, keys: object = ("0",), storages: bytes | None = None, **system: Any) -> Path:
    head = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, **system})]
    code = code.replace(b"tQ", b"NtQ")
    data = struct.pack("<q", 2) + bytes(8) if storages is None else storages
    path.write_bytes(b"".join([*head, code, pickle.dumps(list(keys) if isinstance(keys, tuple) else keys, 2), data]))
    return path


def test_a_sound_one(store: tsck.Store, tmp_path: Path) -> None:
    import_checkpoint(store, legacy(tmp_path / "a.pt"), ref="x")
    assert torch.equal(store.checkout("x"), torch.zeros(2))


@pytest.mark.parametrize(
    "lie",
    [
        {"keys": ()},
        {"keys": ("0", "0")},
        {"keys": ("0", "1")},
        {"keys": ("1",)},
        {"keys": 7},
        {"keys": ([],)},
        {"little_endian": False},
        {"storages": b""},
        {"storages": struct.pack("<q", -2) + bytes(8)},
        {"storages": struct.pack("<q", 10**12) + bytes(8)},
        {"storages": struct.pack("<q", 1) + bytes(4)},
        {"storages": struct.pack("<q", 2) + bytes(8) + b"more"},
        {"code": SYSTEM + text("touch hacked") + b"\x85R0" + TENSOR},
        {"code": tensor(shape=b"K\x03\x85") + b"."},
    ],
)
def test_old_files_that_lie(refuse: Refuse, tmp_path: Path, lie: dict[str, Any]) -> None:
    refuse(legacy(tmp_path / "a.pt", **lie))


def test_the_name_of_the_newest_tag_is_not_read_from_elsewhere(refuse: Refuse, tmp_path: Path) -> None:
    """A message would print what the link leads to."""
    (tmp_path / "private").write_text("root:secret")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "latest").symlink_to("../private")
    message = refuse(folder, tsck.InvalidNameError)
    assert "leads out of its folder" in message
    assert "secret" not in message


def test_fields_of_a_class_of_dcp_that_are_given_by_a_call_are_refused(refuse: Refuse, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"\x80\x02" + name("torch.distributed.checkpoint.metadata", "Metadata") + b"K\x01\x85R.")
    assert "metadata" in refuse(folder).lower()
