"""The standalone reader on stores that were made to stop it, to fill its memory, or to lead it or a terminal elsewhere."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.format.sealed import pack_body, seal, unpack_body
from tensorstore_ck.format.store_config import _checksum, _dump
from tests.format.forged import Forged, layout_of, publish
from tests.format.standalone.test_tsck_read import run, run_alone

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(tmp_path: Path, folder: Path) -> Iterator[tsck.Store]:
    with tsck.open(folder, create=True, cache_dir=tmp_path / "cache") as opened:
        opened.put_snapshot({"w": torch.zeros(100_000)}, ref="runs/a", step=1)
        yield opened


def refused(folder: Path, tmp_path: Path, address: str = "bomb") -> str:
    """What the reader says; it leaves no output."""
    return error_of(run(folder, address, tmp_path / "out.safetensors"), tmp_path)


def error_of(ran: Any, tmp_path: Path) -> str:
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("tsck_read: ")
    assert ran.stderr.count("\n") == 1
    assert not list(tmp_path.glob("out.*"))
    return str(ran.stderr)


def append(folder: Path, op: dict[str, object]) -> None:
    """Adds a log entry that no writer of this package would."""
    log = next(path for path in sorted((folder / "log").rglob("0*"), reverse=True) if path.is_file())
    body = {"n": int(log.name) + 1, "prev": log.read_bytes()[-32:], "write_id": bytes(16), "time_ns": 1, "actor": "x", "signatures": []}
    (log.parent / f"{body['n']:020d}").write_bytes(seal("log", {**body, "ops": [op]}))


def test_a_field_of_another_type_is_damage(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    store.put_snapshot({"w": torch.ones(3)}, ref="bomb")
    last = max(path for path in (folder / "log").rglob("0*") if path.is_file()).read_bytes()
    (put,) = unpack_body(memoryview(last)[8:-32], "an entry")["ops"]
    append(folder, {**put, "txn": bytes(16), "metrics": 5})
    assert "the store is damaged: TypeError" in refused(folder, tmp_path)


def test_nothing_that_a_terminal_obeys_is_printed(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    shown = "\x1b[2J\u202eevil\u2028\x07"
    layout = layout_of(["d", [shown], [0]], [(shown, (2,))])
    publish(store, Forged(layout, inline=bytes(4)))
    store.mark("runs/a", "bad", reason="r")
    append(folder, {"op": "branch", "critical": True, "name": shown, "root": bytes.fromhex(store.resolve("runs/a").root)})
    ran = run(folder, "list")
    assert ran.returncode == 0
    assert "branch \\x1b[2J\\u202eevil\\u2028\\x07" in ran.stdout
    for text in (ran.stdout, refused(folder, tmp_path), run(folder, shown, tmp_path / "out.safetensors").stderr):
        assert text.replace("\n", "").isprintable()


def reconfigure(folder: Path, **changes: object) -> None:
    """Replaces values of store.json, under a right checksum."""
    body = {**json.loads((folder / "store.json").read_text()), **changes}
    del body["checksum"]
    (folder / "store.json").chmod(0o600)
    (folder / "store.json").write_bytes(_dump({**body, "checksum": _checksum(body)}))


@pytest.mark.parametrize(
    "changes",
    [{"log": "../../.."}, {"log": "/proc"}, {"log": ""}, {"log": 1}, {"block_bytes": 1}, {"block_bytes": 1 << 40}, {"block_bytes": "x"}],
    ids=str,
)
def test_store_json_of_no_store(store: tsck.Store, folder: Path, changes: dict[str, object]) -> None:
    reconfigure(folder, **changes)
    assert "store.json is damaged" in run(folder, "list").stderr


def test_the_log_is_listed_no_deeper_than_a_log_is(store: tsck.Store, folder: Path) -> None:
    """Else a link in place of the log is a walk through the disk."""
    listed = run(folder, "list")
    deep = folder / "log" / f"{0:017d}" / "deep"
    deep.mkdir()
    (deep / f"{9:020d}").touch()
    (folder / "log" / f"{1:017d}").symlink_to(deep)
    assert run(folder, "list") == listed


def test_no_object_is_read_through_a_link_or_a_fifo(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    entry = folder / "log" / f"{0:017d}" / f"{2:020d}"
    os.mkfifo(entry)
    assert "is not a file" in run_alone(folder, "list").stderr
    entry.unlink()
    (pack,) = (path for path in (folder / "packs").rglob("*") if path.is_file())
    pack.rename(tmp_path / "pack")
    pack.symlink_to(tmp_path / "pack")
    assert f"{pack.name} cannot be read" in refused(folder, tmp_path, "runs/a")
    pack.unlink()
    os.mkfifo(pack)
    assert f"{pack.name} is not a file" in error_of(run_alone(folder, "runs/a", tmp_path / "out.safetensors"), tmp_path)


def test_the_output_is_not_written_through_links(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("out.json", "out.json.partial", "out.safetensors.partial", "out.safetensors"):
        (tmp_path / name).symlink_to(victim)
    assert run(folder, "runs/a", tmp_path / "out.safetensors").returncode == 0
    assert victim.read_text() == "precious"
    assert {path.name: path.is_symlink() for path in tmp_path.glob("out.*")} == {"out.json": False, "out.safetensors": False}


def test_a_layout_that_expands_is_refused_before_it_is_parsed(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    assert publish(store, Forged(layout_of(["l", [["l", []]] * 1_000_000]))) < 10_000
    assert "more memory to parse" in refused(folder, tmp_path)


def test_values_that_expand_are_refused_before_they_are_parsed(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    items = pack_body(["u", [None] * 1_000_000])
    assert publish(store, Forged(layout_of(None), [["b", "m", 0]], [[items]])) < 10_000
    assert "more memory to parse" in refused(folder, tmp_path)


def test_a_value_that_contains_itself_is_refused(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    """Twice in each level it would be more values than there are atoms."""
    twice = pack_body(["tree", ["l", [None, None]], [["b", "m", 0]] * 2])
    publish(store, Forged(layout_of(None), [["b", "m", 0]], [[twice]]))
    assert "two values are in one blob" in refused(folder, tmp_path)


def test_a_long_key_above_many_containers_is_refused(store: tsck.Store, folder: Path, tmp_path: Path) -> None:
    publish(store, Forged(layout_of(["d", ["k" * MIB], [["l", [["l", []]] * 10_000]]])))
    assert "more memory to parse" in refused(folder, tmp_path)


@pytest.mark.parametrize("block_bytes", [4096, 4 * MIB])
def test_more_tensors_than_blocks_are_refused_before_anything_is_allocated(
    store: tsck.Store, folder: Path, tmp_path: Path, block_bytes: int
) -> None:
    """Else the output fills the disk, and the block grid the memory."""
    publish(store, Forged(layout_of(["d", ["w"], [0]], [("w", (1 << 23, 1 << 23))]), tensors=[bytes(4 * MIB)]))
    reconfigure(folder, block_bytes=block_bytes)
    assert "do not have all of its tensors" in refused(folder, tmp_path)


@pytest.mark.parametrize(("pieces", "mesh"), [(1 << 40, [2]), (4097, [2]), (0, [2])])
def test_tensors_that_are_sharded_into_more_boxes_than_there_can_be(
    store: tsck.Store, folder: Path, tmp_path: Path, pieces: int, mesh: list[int]
) -> None:
    ranks = np.arange(2, dtype="<u4").tobytes()
    placements = {"kinds": [[0, [[0, pieces]]]], "of": bytes(2)}
    layout = layout_of(["d", ["w"], [0]], [("w", (1 << 42,))], mesh=[[mesh, ranks]], placements=placements)
    publish(store, Forged(layout))
    assert "more boxes" in refused(folder, tmp_path)
