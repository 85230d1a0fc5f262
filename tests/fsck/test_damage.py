"""Every kind of object x {flipped bytes, truncated, deleted, swapped}: found, named, and what it hits is exactly what fails."""

import re

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.config import StoreConfig, decode_config
from tensorstore_ck.errors import StoreError
from tensorstore_ck.findings import FsckReport
from tensorstore_ck.fsck import run_fsck
from tensorstore_ck.opening import make_engine
from tensorstore_ck.table import MemoryTable
from tests.fsck.stores import build, failing_roots, names, read, reopen

OBJECTS = {name: read(build_backend, name) for build_backend in [build()] for name in names(build_backend)}
KINDS = ("store.json", "log/", "snapshots/", "parts/", "packs/")


def copy(objects: dict[str, bytes]) -> MemoryBackend:
    backend = MemoryBackend()
    for name, data in objects.items():
        backend.put(name, data)
    return backend


CONFIG: StoreConfig = decode_config(OBJECTS["store.json"], "memory:")


def check(backend: Backend, *, read_data: bool = True) -> FsckReport:
    """As a process that opened the store before it was damaged."""
    return run_fsck(make_engine(backend, CONFIG, MemoryTable()), read_data=read_data)


def of_kind(kind: str) -> list[str]:
    return [name for name in OBJECTS if name.startswith(kind)]


def assert_found(backend: Backend, damaged: set[str]) -> None:
    """fsck names each damaged object, and its hits are the snapshots that cannot be restored."""
    report = check(backend)
    assert not report.ok
    found = [finding for finding in report.findings if finding.object in damaged and finding.severity == "error"]
    assert {finding.object for finding in found} == damaged
    hit = {root for finding in report.findings for text in finding.hits for root in re.findall(r"root (\w{12})", text)}
    try:
        failing = set(failing_roots(backend))
    except StoreError:
        assert damaged & {name for name in OBJECTS if name == "store.json" or name.startswith("log/")}
    else:
        assert hit == failing


def test_intact_store_has_no_findings() -> None:
    report = check(copy(OBJECTS))
    assert report.findings == ()
    assert (report.log_entries, report.snapshots, report.packs) == (8, 4, 4)
    assert report.blocks > 0
    assert report.data_bytes > 0


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bytes(kind: str) -> None:
    for number, name in enumerate(of_kind(kind)):
        data = OBJECTS[name]
        step = 1 if number == 0 and len(data) < 4096 else max(1, len(data) // 12)
        for position in [*range(0, len(data), step), len(data) - 1]:
            flipped = bytearray(data)
            flipped[position] ^= 1 << position % 8
            assert_found(copy({**OBJECTS, name: bytes(flipped)}), {name})


@pytest.mark.parametrize("kind", KINDS)
def test_truncated(kind: str) -> None:
    for name in of_kind(kind):
        size = len(OBJECTS[name])
        for length in {0, 1, size // 2, size - 64, size - 1}:
            assert_found(copy({**OBJECTS, name: OBJECTS[name][:length]}), {name})


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_behind_the_end(kind: str) -> None:
    for name in of_kind(kind):
        assert_found(copy({**OBJECTS, name: OBJECTS[name] + b"\0"}), {name})


@pytest.mark.parametrize("kind", KINDS)
def test_deleted(kind: str) -> None:
    for name in of_kind(kind):
        if name != of_kind("log/")[-1]:  # that one leaves no trace but in caches
            assert_found(copy({other: data for other, data in OBJECTS.items() if other != name}), {name})


@pytest.mark.parametrize("kind", KINDS[1:])
def test_swapped(kind: str) -> None:
    first, second, *_ = of_kind(kind)
    assert_found(copy({**OBJECTS, first: OBJECTS[second], second: OBJECTS[first]}), {first, second})


def test_the_last_log_entry_is_missed_by_a_host_that_saw_it() -> None:
    backend = copy(OBJECTS)
    engine = make_engine(backend, CONFIG, MemoryTable())
    engine.log.sync()
    last = of_kind("log/")[-1]
    backend.delete([last])
    report = run_fsck(engine, read_data=False)
    assert [finding.object for finding in report.findings if finding.severity == "error"] == [last]


def test_a_lost_entry_names_the_snapshot_that_it_may_have_published() -> None:
    backend = copy(OBJECTS)
    entry = of_kind("log/")[1]
    backend.delete([entry])
    (finding,) = [finding for finding in check(backend).findings if finding.object == entry]
    assert finding.kind == "broken_log"
    assert finding.repairable
    assert any("runs/a@2" in hit for hit in finding.hits)


def test_hits_name_refs_steps_and_tensors() -> None:
    backend = copy(OBJECTS)
    pack = of_kind("packs/")[1]  # written by the second snapshot: its `weight` and `blob`
    backend.delete([pack])
    (finding,) = [finding for finding in check(backend).findings if finding.object == pack]
    (hit,) = finding.hits
    assert "runs/a@2" in hit
    assert "paper" in hit
    assert "weight" in hit
    assert "blob" in hit
    assert "base" not in hit


def test_a_checkpoint_is_compared_with_the_log() -> None:
    backend = copy(OBJECTS)
    store = reopen(backend)
    while not names(backend, "checkpoint/"):
        store.annotate("runs/a@1", {"metric": 1.0})
    assert check(backend).ok
    (checkpoint,) = names(backend, "checkpoint/")
    data = bytearray(read(backend, checkpoint))
    for position in range(0, len(data), len(data) // 40):
        data[position] ^= 4
        backend.replace(checkpoint, data)
        (finding,) = check(backend, read_data=False).findings
        assert (finding.object, finding.severity) == (checkpoint, "error")
        data[position] ^= 4
    other = names(copy(OBJECTS), "log/")[2]
    backend.replace(checkpoint, bytes(data))
    backend.delete([other])  # covered by the checkpoint: found, and everything can be read
    assert [finding.object for finding in check(backend).findings if finding.severity == "error"] == [other]


def test_leftovers_are_notices_and_their_damage_is_told() -> None:
    backend = copy(OBJECTS)
    pack, part, record = (of_kind(kind)[0] for kind in ("packs/", "parts/", "snapshots/"))
    strays = {name: name[:-8] + "ZZZZZZ" + name[-2:] for name in (pack, part, record)}
    for name, stray in strays.items():
        backend.put(stray, OBJECTS[name])
    backend.put("packs/ZZ/01M7Y7A2JN6QT6KYB17GC64DZZ", OBJECTS[pack][:100])
    backend.put("notes.txt", b"hello")
    report = check(backend)
    assert report.ok
    assert {finding.object for finding in report.findings} == {*strays.values(), "packs/ZZ/01M7Y7A2JN6QT6KYB17GC64DZZ", "notes.txt"}
    for stray in strays.values():
        data = bytearray(read(backend, stray))
        data[len(data) // 2] ^= 1
        backend.replace(stray, data)
    damaged = {finding.object for finding in check(backend).findings if finding.kind == "corrupt_object"}
    assert damaged == {*strays.values(), "packs/ZZ/01M7Y7A2JN6QT6KYB17GC64DZZ"}


def test_what_appears_after_the_start_is_not_judged() -> None:
    backend = copy(OBJECTS)
    engine = make_engine(backend, CONFIG, MemoryTable(), clock=lambda: 1)
    backend.put("packs/ZZ/01M7Y7A2JN6QT6KYB17GC64DZZ", b"being written")
    assert run_fsck(engine, read_data=True).findings == ()


def test_local_files(tmp_path: object) -> None:
    backend = LocalBackend(f"{tmp_path}/store")
    for name, data in OBJECTS.items():
        backend.put(name, data)
    assert check(backend).ok
    for kind in KINDS[2:]:
        name = of_kind(kind)[0]
        flipped = bytearray(OBJECTS[name])
        flipped[len(flipped) // 2] ^= 1
        backend.replace(name, flipped)
        assert_found(backend, {name})
        backend.replace(name, OBJECTS[name])


def test_progress_ends_at_the_total() -> None:
    seen: list[tuple[int, int]] = []
    run_fsck(make_engine(copy(OBJECTS), CONFIG, MemoryTable()), read_data=True, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert all(done <= total for done, total in seen)
