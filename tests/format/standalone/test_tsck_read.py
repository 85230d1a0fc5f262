"""The standalone reader reads every kind of store as the package does, without it, and says which object is damaged."""

import contextlib
import functools
import importlib.util
import io
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tensorstore_ck as tsck
from tensorstore_ck.backend import open_backend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import new_ulid
from tensorstore_ck.engine.interfaces import CapturedState, ListedSources
from tensorstore_ck.format.layout import Layout
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.part import decode_part, part_name
from tensorstore_ck.format.record import decode_record, record_name
from tensorstore_ck.format.sharding import Mesh, Shard
from tensorstore_ck.maintenance.salvage import salvage
from tensorstore_ck.state.registered_types import DTYPE_NAMES
from tests.effort import PATIENCE_SECONDS
from tests.format.golden.content import golden_state
from tests.format.golden.test_golden import CODEC_ROOTS, CODECS, GOLDEN, RANKS_ROOTS, ROOTS
from tests.format.golden.test_golden import RANKS as UNLIKE_RANKS
from tests.gc.relocated import footer_of, packs_of, relocate
from tests.gc.stores import AT_ONCE, contents
from tests.gc.stores import open_store as open_over
from tests.session.group.built import INFOS, OBJECTS, PARTS, RANKS, stage, tensors
from tests.session.group.states import Spreading, captured, sharded, whole
from tests.session.group.stores import put_all

SCRIPT = Path(__file__).parents[3] / "tensorstore_ck" / "standalone" / "tsck_read.py"
ALONE = """
import runpy, sys
sys.modules.update(dict.fromkeys(["tensorstore_ck", "msgpack", "torch", "safetensors", "lmdb", "fsspec"]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Exported(NamedTuple):
    """What the reader wrote."""

    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]
    """Name -> dtype, shape, bytes."""
    described: dict[str, Any]


def run_alone(*args: object) -> "subprocess.CompletedProcess[str]":
    """The script as a user runs it, where nothing but numpy, blake3 and lz4 can be imported."""
    return subprocess.run(
        [sys.executable, "-I", "-c", ALONE, SCRIPT, *map(str, args)], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


@functools.cache
def loaded() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("tsck_read", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ran(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(*args: object) -> Ran:
    """The script's `main` in this process, which is quicker than `run_alone`."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = loaded().main([*map(str, args)])
    return Ran(code, out.getvalue(), err.getvalue())


def exported(store: Path, address: str, out: Path) -> Exported:
    result = run(store, address, out)
    assert (result.returncode, result.stderr) == (0, "")
    assert not list(out.parent.glob("*.partial"))
    return read(out)


def read(out: Path) -> Exported:
    data = out.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__")["format"] == "pt"
    found = {}
    for name, each in header.items():
        start, stop = (8 + size + offset for offset in each["data_offsets"])
        found[name] = (each["dtype"], tuple(each["shape"]), data[start:stop])
    return Exported(found, json.loads(out.with_suffix(".json").read_text()))


def assert_same(store: tsck.Store, address: str, found: Exported) -> None:
    """Every tensor and array of the state, by its path."""
    with store.open_snapshot(address) as snapshot:
        assert set(found.tensors) == set(snapshot.names())
        for name, lazy in snapshot.items():
            dtype, shape, data = found.tensors[name]
            value = lazy[...]
            raw = value.tobytes() if isinstance(value, np.ndarray) else value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert data == raw, name
            details = found.described["tensors"].get(name, {})
            if "dtype" in details:  # safetensors has no such dtype
                assert (dtype, shape) == ("U8", (*value.shape, value.itemsize)), name
            else:
                assert shape == tuple(value.shape), name


def written(objects: Mapping[str, bytes], folder: Path) -> Path:
    for name, data in objects.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(tmp_path: Path, folder: Path) -> Iterator[tsck.Store]:
    with tsck.open(folder, create=True, cache_dir=tmp_path / "cache") as store:
        yield store


# --- stores of one rank -----------------------------------------------------------------------------------------------


def test_the_golden_store(tmp_path: Path) -> None:
    result = run_alone(GOLDEN, "list")
    assert result.stdout.splitlines() == [
        "branch exp/one",
        f"  {ROOTS[1]}  step 1  marked bad",
        "branch runs/golden",
        f"  {ROOTS[2]}  step 2",
        f"  {ROOTS[1]}  step 1  marked bad",
        "tag v1",
        f"  {ROOTS[2]}  step 2",
    ]
    shutil.copytree(GOLDEN, tmp_path / "v1")
    with tsck.open(tmp_path / "v1", cache_dir=tmp_path / "cache") as store:
        for address in ("runs/golden@1", "v1"):
            result = run_alone(GOLDEN, address, tmp_path / "out.safetensors")
            assert (result.returncode, result.stderr) == (0, "")
            found = read(tmp_path / "out.safetensors")
            assert_same(store, address, found)
    values = found.described["values"]
    state: Any = golden_state(2)
    assert values["values.3"] == -1
    assert values["values.4"] == 1 << 80
    assert values["values.6"] == {"float": "-inf"}
    assert values["values.8"] == state["values"][8]
    assert values["long"] == state["long"]
    assert values["rng.1"] == {"tuple": list(state["rng"][1])}
    assert found.described["containers"]["counter"] == {"type": "Counter", "keys": [5, 7]}
    assert found.described["metrics"] == {"loss": 0.5, "eval": 0.75, "late": 63.0}
    assert found.described["metadata"] == {"lr": 0.1, "tags": ["a", None]}
    assert found.described["root"] == ROOTS[2]
    assert found.described["tensors"]["model.view"] == {"shares memory with": "model.weight"}


def test_every_dtype_and_form(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (6000 * 16,), dtype=torch.uint8, generator=generator)
    base = torch.arange(6000.0).reshape(60, 100)
    state: dict[Any, Any] = {
        "dtypes": {name: raw[: 6000 * dtype.itemsize].clone().view(dtype) for dtype, name in DTYPE_NAMES.items() if dtype != torch.bool},
        "bool": raw > 100,
        "numpy": [np.arange(3000, dtype=dtype) for dtype in ("<u2", ">i4", "<f2", "<c16", "|i1")],
        "texts": np.array(["a", "bc"]),
        "base": base,
        "tied": base,
        "transposed": base.t(),
        "every third": base[::3, 5:],
        "repeated": torch.ones(1).expand(4, 5),
        "overlapping": [raw[10:5000], raw[100:9000].numpy()[::-1]],
        "scalar": torch.tensor(2.5),
        "empty": [torch.zeros(0, 3), torch.zeros(3, 0, dtype=torch.int8)],
        "grid": torch.arange(3_000_000, dtype=torch.int32).reshape(1000, 3000),
        "long rows": torch.arange(2 * 1_100_000, dtype=torch.int32).reshape(2, 1_100_000),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "blob": bytes(range(256)) * 10_000,
        "text": "é" * 50_000,
        "surrogate": "\udcff",
        5: {(1, "x"): torch.ones(2)},
        "a.b": 1,
        "a": {"b": 2},
    }
    store.put_snapshot(state, ref="runs/all", step=1)
    found = exported(folder, "runs/all", tmp_path / "out.safetensors")
    odd = [name for name in found.tensors if name.startswith("5.")]
    assert found.tensors[odd[0]][2] == torch.ones(2).numpy().tobytes()
    del found.tensors[odd[0]], state[5]
    store.put_snapshot(state, ref="runs/all", step=2)
    assert_same(store, "runs/all", found)
    assert found.described["tensors"]["parameter"] == {"requires_grad": True, "parameter": True}
    assert found.described["tensors"]["dtypes.complex128"]["dtype"] == "complex128"
    assert found.described["values"]["text"] == state["text"]
    assert found.described["values"]["surrogate"] == state["surrogate"]
    assert (found.described["values"]["a.b"], found.described["values"]["a.b#2"]) == (1, 2)
    assert len(found.described["values"]["blob"]["bytes"]) > 1 << 20


def test_a_file_that_safetensors_reads_and_one_without_tensors(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    names = ("float64", "float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "complex64", "uint16")
    state = {name: torch.arange(2000).to(getattr(torch, name)) for name in names}
    store.put_snapshot(state, ref="runs/a")
    exported(folder, "runs/a", tmp_path / "out.safetensors")
    loaded = load_file(tmp_path / "out.safetensors")
    restored = store.checkout("runs/a")
    assert set(loaded) == set(restored)
    assert all(loaded[name].dtype == value.dtype and torch.equal(loaded[name], value) for name, value in restored.items())
    keys = {key: torch.full((2,), float(number)) for number, key in enumerate((True, "True", None, 1.5, -7))}
    store.put_snapshot({"by": keys}, ref="runs/keys")
    exported(folder, "runs/keys", tmp_path / "keys.safetensors")
    with store.open_snapshot("runs/keys") as snapshot:
        loaded = load_file(tmp_path / "keys.safetensors")
        assert {name: tensor.tolist() for name, tensor in loaded.items()} == {name: snapshot[name][:].tolist() for name in snapshot}
    store.put_snapshot({"step": 3, "none": {}}, ref="runs/b")
    found = exported(folder, "runs/b", tmp_path / "none.safetensors")
    assert (found.tensors, found.described["values"]) == ({}, {"step": 3})


# --- the log ----------------------------------------------------------------------------------------------------------


def step_state(step: int) -> dict[str, Any]:
    return {"t": torch.full((2000,), step), "step": step}


def listed(folder: Path) -> dict[str, list[int]]:
    refs: dict[str, list[int]] = {}
    for text in run(folder, "list").stdout.splitlines():
        if text.startswith(" "):
            refs[next(reversed(refs))].append(int(text.split()[2]))
        else:
            refs[text.split()[1]] = []
    return refs


def test_histories(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    """Branches, resets, tags, and what was forgotten, undone and freed, as the package has them."""

    def check() -> None:
        refs = {name: [snapshot.step for snapshot in store.log(name)] for name in (*store.branches(), *store.tags())}
        assert listed(folder) == refs

    for step in range(8):
        store.put_snapshot(step_state(step), ref="runs/a", step=step)
    store.branch("runs/b", "runs/a@3")
    store.reset("runs/a", "runs/a@5")
    store.put_snapshot(step_state(6), ref="runs/a", step=6, metadata={"again": True})
    store.tag("best", "runs/a@4")
    store.tag("late", "runs/a~1")
    check()
    store.forget("runs/a@0", "runs/a@7", "runs/a@3")
    store.forget("runs/b")
    store.untag("late")
    check()
    store.undo("runs/b")
    store.undo("late")
    store.put_snapshot(step_state(9), ref="runs/b", step=9, expect=tsck.ANY)
    check()
    store.gc(AT_ONCE)
    check()
    for address, step in {"runs/a": 6, "runs/a~1": 5, "best": 4, "late": 5, "runs/b@9": 9, store.resolve("best").root[:8]: 4}.items():
        found = exported(folder, address, tmp_path / "out.safetensors")
        assert found.described["values"] == {"step": step}
        assert found.described["time_ns"] == store.resolve(address).time_ns
        assert_same(store, address, found)
    for address in ("runs/c", "runs/a@0", "best@3", "runs/a~50", "??", "0" * 8, "runs/a@@1"):
        result = run(folder, address, tmp_path / "none.safetensors")
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1
        assert address in result.stderr
    assert not list(tmp_path.glob("none*"))


def move_through(store: tsck.Store, hops: int, *, back: bool) -> None:
    """Moves the only pack to others that are not there, and at last to a copy of itself, or back to itself."""
    (pack,) = packs_of(store.engine)
    footer, end = footer_of(store.engine, pack), new_ulid()
    store.engine.backend.put(pack_name(end), store.engine.backend.get(pack_name(pack), max_bytes=1 << 30))
    way = [pack, *(new_ulid() for _ in range(hops - 1)), pack if back else end]
    entries = range(len(footer.entries))
    relocate(store.engine, [(one, [(entry, to, entry) for entry in entries]) for one, to in itertools.pairwise(way)], footer)
    store.engine.backend.delete([pack_name(pack)])


@pytest.mark.parametrize(("hops", "back"), [(1200, False), (1, True), (3, True)])
def test_blocks_that_were_moved_any_number_of_times_or_in_a_circle(tmp_path: Path, hops: int, back: bool) -> None:
    with open_over() as store:
        store.put_snapshot({f"t{number}": torch.full((3000,), number) for number in range(4)}, ref="runs/a")
        move_through(store, hops, back=back)
        folder = written(contents(store.engine.backend), tmp_path / "store")
        if not back:
            assert_same(store, "runs/a", exported(folder, "runs/a", tmp_path / "out.safetensors"))
            return
    result = run(folder, "runs/a", tmp_path / "out.safetensors")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.endswith("its relocations form a cycle\n")


def test_packs_that_were_moved_to_another_folder(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    store.put_snapshot(step_state(0), ref="runs/a", step=0)
    store.set_policy("*", move_after=("1s", str(tmp_path / "cold")))
    clock = store.engine.clock
    store.engine.clock = lambda: clock() + 10**12
    store.migrate_tiers()
    store.gc(tsck.GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1))
    assert not [path for path in (folder / "packs").rglob("*") if path.is_file()]
    assert_same(store, "runs/a", exported(folder, "runs/a", tmp_path / "out.safetensors"))
    (tmp_path / "cold").rename(tmp_path / "taken")
    assert f"it was moved to {tmp_path / 'cold'}" in run(folder, "runs/a", tmp_path / "none.safetensors").stderr
    shutil.copytree(tmp_path / "taken" / store.engine.config.uuid / "packs", folder / "packs", dirs_exist_ok=True)
    assert exported(folder, "runs/a", tmp_path / "again.safetensors")


def test_a_salvaged_log(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    roots = [store.put_snapshot(step_state(step), ref="runs/a", step=step).root for step in range(3)]
    store.close()
    (folder / "log" / f"{0:017d}" / f"{2:020d}").unlink()
    assert "cannot be read" in run(folder, "list").stderr
    salvage(open_backend(folder))
    found = exported(folder, roots[1], tmp_path / "out.safetensors")
    assert found.described["values"] == {"step": 1}


# --- many ranks -------------------------------------------------------------------------------------------------------


def test_many_ranks(folder: Path, tmp_path: Path) -> None:
    written(OBJECTS, folder)
    for info in INFOS:
        found = exported(folder, info.root.hex(), tmp_path / "out.safetensors")
        step = info.step or 0
        expected = {f"{number}": each.whole for number, each in enumerate(tensors(step).values())}
        own = {f"rank_state[{rank}].0": whole((2000,), 100 * step + rank) for rank in range(RANKS)}
        assert {name: each[1:] for name, each in found.tensors.items()} == {
            name: (array.shape, array.tobytes()) for name, array in {**expected, **own}.items()
        }
        assert found.described["ranks"] == RANKS
        assert found.described["values"]["rank_state[3].1"] == 3


def odd_placements(rank: int) -> CapturedState:
    """Uneven and empty shards, strided ones, one dim sharded twice, replicas that share the writing, a rank outside of a mesh."""
    meshes = [Mesh((2, 3), (5, 0, 1, 4, 2, 3)), Mesh((6,), tuple(range(6))), Mesh((2,), (4, 1))]
    found = {
        "uneven": Spreading(whole((5, 7000)), sharded(1, Shard(0))),
        "twice": Spreading(whole((25, 900), 1), sharded(0, Shard(0), Shard(0))),
        "strided": Spreading(whole((7, 13, 500), 2), sharded(0, Shard(1, 3), Shard(1))),
        "columns": Spreading(whole((300, 601), 3), sharded(0, Shard(1), None)),
        "two": Spreading(whole((9, 2000), 4), sharded(2, Shard(0))),
        "large": Spreading(whole((1500, 4100), 5), None),
        "two blocks": Spreading(whole((1100, 700), 8), None),
        "small": Spreading(whole((11,), 6), sharded(0, None, Shard(0))),
        "scalar": Spreading(whole((), 7), None),
        "inline": Spreading(whole((1024,), 9), None),
        "not inline": Spreading(whole((1025,), 10), None),
    }
    return captured(found, meshes, rank, 6)


@pytest.mark.parametrize(("ranks", "part"), [(RANKS, stage), (6, odd_placements)], ids=["pipeline stages", "odd placements"])
def test_states_of_many_ranks(folder: Path, tmp_path: Path, ranks: int, part: Callable[[int], CapturedState]) -> None:
    backend = MemoryBackend()
    store = open_over(backend)
    put_all(backend, ranks, part)
    assert_same(store, "job", exported(written(contents(backend), folder), "job", tmp_path / "out.safetensors"))


def test_a_subtree_replaces_a_hole(folder: Path, tmp_path: Path) -> None:
    subtree = ["tree", ["d", ["a", "b"], [None, ["l", [None, ["d", [], []]]]]], [1, ["ui", b"\2" + bytes(7)]]]
    layout = Layout([], ["d", ["x", "y"], [None, None]])
    backend = MemoryBackend()
    open_over(backend)
    put_all(backend, 1, lambda _: CapturedState(layout, [subtree, "text"], (), ListedSources()))
    found = exported(written(contents(backend), folder), "job", tmp_path / "out.safetensors")
    assert found.described["values"] == {"x.a": 1, "x.b.0": {"tuple": [2]}, "y": "text"}
    assert found.described["containers"] == {".": "dict", "x": "dict", "x.b": "list", "x.b.1": "dict"}


# --- damage -----------------------------------------------------------------------------------------------------------


Refused = Callable[[Mapping[str, bytes | None]], str]


@pytest.fixture
def refused(folder: Path, tmp_path: Path) -> Refused:
    """What the reader says of a store in which some objects are other ones, or gone."""
    written(OBJECTS, folder)

    def read_changed(changed: Mapping[str, bytes | None]) -> str:
        for name, data in changed.items():
            (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
        code, _, error = run(folder, INFOS[0].root.hex(), tmp_path / "out.safetensors")
        assert (code, error.count("\n")) == (1, 1)
        assert error.startswith("tsck_read: ")
        assert not list(tmp_path.glob("out.*"))
        for name in changed:
            (folder / name).write_bytes(OBJECTS[name])
        return error

    return read_changed


def flipped(name: str, at: int) -> dict[str, bytes]:
    """An object with one bit flipped."""
    data = bytearray(OBJECTS[name])
    data[at] ^= 1
    return {name: bytes(data)}


def test_a_flipped_bit_in_any_object_and_block(refused: Refused) -> None:
    log = sorted(name for name in OBJECTS if name.startswith("log/"))
    for name in ("store.json", *log, record_name(INFOS[0].ulid), *PARTS):
        size = len(OBJECTS[name])
        for at in (size // 3, size - 1, 2):
            assert f"{name} is damaged" in refused(flipped(name, at)), at
        assert f"{name} is damaged" in refused({name: OBJECTS[name][:-1]})
        if name != log[-1]:  # without it the log ends one entry before
            assert f"{name} cannot be read" in refused({name: None})
    for part in (decode_part(OBJECTS[name], name) for name in PARTS):
        for row in part.extents[:: max(1, len(part.extents) // 2)]:
            name, offset = pack_name(part.packs[row["pack"]]), int(row["offset"])
            assert f"{name} is damaged: the block at offset {offset}" in refused(flipped(name, offset + int(row["stored"]) // 2))
            assert f"{name} cannot be read" in refused({name: None})


def test_objects_that_are_whole_but_elsewhere(refused: Refused) -> None:
    one, two = (record_name(info.ulid) for info in INFOS)
    assert "its root differs" in refused({one: OBJECTS[two]})
    second = decode_record(OBJECTS[two], two)
    for rank, name in enumerate(PARTS):
        assert f"{name} is not part {rank}" in refused({name: OBJECTS[part_name(second.parts[rank])]})
    first, last = f"log/{0:017d}/{1:020d}", f"log/{0:017d}/{2:020d}"
    assert f"{first} is damaged" in refused({first: OBJECTS[last]})
    assert f"{last} is damaged: it does not follow" in refused({last: (GOLDEN / last).read_bytes()})


def test_a_damaged_moved_object(tmp_path: Path, store: tsck.Store, folder: Path) -> None:
    kept = {"k": torch.full((3000,), 1)}
    store.put_snapshot({**kept, "t": torch.randn(40_000)}, ref="runs/a")
    store.put_snapshot(kept, ref="runs/kept")
    store.forget("runs/a")
    store.gc(tsck.GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1, compact_below=0.95))
    (moved,) = [path for path in (folder / "moved").rglob("*") if path.is_file()]
    assert_same(store, "runs/kept", exported(folder, "runs/kept", tmp_path / "sound.safetensors"))
    data = bytearray(moved.read_bytes())
    data[40] ^= 1
    moved.write_bytes(data)
    result = run(folder, "runs/kept", tmp_path / "out.safetensors")
    assert (result.returncode, result.stdout) == (1, "")
    assert f"{moved.name} is damaged" in result.stderr


def test_no_store(tmp_path: Path) -> None:
    result = run_alone(tmp_path, "list")
    assert (result.returncode, result.stderr) == (1, "tsck_read: store.json cannot be read: No such file or directory\n")
    assert run_alone().returncode == 2


@pytest.mark.parametrize(("golden", "addresses"), [(CODECS, CODEC_ROOTS), (UNLIKE_RANKS, RANKS_ROOTS)], ids=["codecs", "ranks"])
def test_every_codec_and_every_way_to_hold_a_tensor(golden: Path, addresses: Mapping[str, str], tmp_path: Path) -> None:
    """Flat shards, boxes and quantised tensors are in the store of ranks that are not alike."""
    shutil.copytree(golden, tmp_path / "golden")
    with tsck.open(tmp_path / "golden", cache_dir=tmp_path / "cache") as store:
        for address in addresses:
            assert_same(store, address, exported(golden, address, tmp_path / "out.safetensors"))


@pytest.mark.parametrize(("codec", "flags", "links"), [(3, 0, 300), (4, 65, 1), (4, 2, 3)])
def test_bases_without_end_are_refused(codec: int, flags: int, links: int) -> None:
    """Else a few rows would mean more blocks than there are in the world."""
    script = loaded()

    class Nothing:
        places: dict[bytes, str] = {}  # noqa: RUF012

        def read(self, name: str, size: int, offset: int, place: str) -> bytes:
            return b""

    part = object.__new__(script.Part)
    part.name, part.store, part.packs = "parts/x", Nothing(), [bytes(16)]
    part.places = {}
    part.extents = np.zeros(400, script.EXTENT)
    for row in range(links):
        part.extents[row] = (0, 0, 64, 8, 8, row + 1, codec, flags)
    with pytest.raises(script.ReadError, match="more bases than there can be"):
        part.decoded(0, "x")
