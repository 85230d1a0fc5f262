"""Every kind of object x {flipped bytes, truncated, deleted, swapped}: found, named, and what it hits is exactly what fails."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.opening import make_engine
from tensorstore_ck.errors import BackendUnavailableError, PermissionDeniedError, StoreError
from tensorstore_ck.format.record import decode_record
from tensorstore_ck.format.store_config import StoreConfig, decode_config
from tensorstore_ck.log import BrokenLogWarning, table_rows
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.checkpoint import dump
from tensorstore_ck.log.entry import decode_entry, seal_entry
from tensorstore_ck.maintenance.fsck import abort_stale_uploads, run_fsck
from tensorstore_ck.maintenance.fsck.check_log import check_log
from tensorstore_ck.maintenance.fsck.findings import MAX_HITS, FsckReport
from tensorstore_ck.maintenance.salvage import salvage
from tests.effort import effort
from tests.end_to_end.crash.faulty import Faults, FaultyBackend
from tests.maintenance.copy_store.places import Watched
from tests.maintenance.fsck.stores import backend_of, begun, build, contents, failing_roots, flip, names, read, reopen

OBJECTS = contents(build())
KINDS = ("store.json", "log/", "snapshots/", "parts/", "packs/")


CONFIG: StoreConfig = decode_config(OBJECTS["store.json"], "memory:")


def check(backend: Backend, *, read_data: bool = True) -> FsckReport:
    """As a process that opened the store before it was damaged."""
    return run_fsck(make_engine(backend, CONFIG, MemoryTable()), read_data=read_data)


def errors(report: FsckReport) -> set[str]:
    """The objects with errors."""
    return {finding.object for finding in report.findings if finding.severity == "error"}


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
    except (StoreError, BrokenLogWarning):
        assert damaged & {name for name in OBJECTS if name == "store.json" or name.startswith("log/")}
    else:
        assert hit == failing


def test_intact_store_has_no_findings() -> None:
    seen: list[tuple[int, int]] = []
    engine = make_engine(backend_of(OBJECTS), CONFIG, MemoryTable())
    report = run_fsck(engine, read_data=True, progress=lambda done, total: seen.append((done, total)))
    assert report.findings == ()
    assert (report.log_entries, report.snapshots, report.packs) == (8, 4, 4)
    assert report.blocks > 0
    assert report.data_bytes > 0
    assert seen[-1][0] == seen[-1][1] > 0
    assert all(done <= total for done, total in seen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bytes(kind: str) -> None:
    for number, name in enumerate(of_kind(kind)):
        data = OBJECTS[name]
        step = max(1, len(data) // effort(96 if number == 0 else 12, 1000))
        for position in [*range(0, len(data), step), len(data) - 1]:
            flipped = bytearray(data)
            flipped[position] ^= 1 << position % 8
            assert_found(backend_of({**OBJECTS, name: bytes(flipped)}), {name})


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_extended_swapped_and_deleted(kind: str) -> None:
    for number, name in enumerate(of_kind(kind)):
        data = OBJECTS[name]
        for length in {size for size in (0, 1, len(data) // 2, len(data) - 64) if size % 2 == number % 2 or number == 0} | {len(data) - 1}:
            assert_found(backend_of({**OBJECTS, name: data[:length]}), {name})
        assert_found(backend_of({**OBJECTS, name: data + b"\0"}), {name})
        if number == 1:
            first = of_kind(kind)[0]
            assert_found(backend_of({**OBJECTS, first: data, name: OBJECTS[first]}), {first, name})
        if name != of_kind("log/")[-1]:  # without it, that one leaves no trace but in caches
            assert_found(backend_of({other: data for other, data in OBJECTS.items() if other != name}), {name})


def test_lost_entries_of_the_log() -> None:
    """One names the snapshot that it may have published; the last one is missed by a host that saw it."""
    backend, entry, last = backend_of(OBJECTS), of_kind("log/")[1], of_kind("log/")[-1]
    engine = make_engine(backend, CONFIG, MemoryTable())
    engine.log.sync()
    backend.delete([last])
    assert errors(run_fsck(engine, read_data=False)) == {last}
    backend.delete([entry])
    (finding,) = [finding for finding in check(backend).findings if finding.object == entry]
    assert (finding.kind, finding.repairable) == ("broken_log", False), "it takes a copy"
    assert any("runs/a@2" in hit for hit in finding.hits)


def test_hits_name_refs_steps_and_tensors_and_many_are_counted() -> None:
    backend = backend_of(OBJECTS)
    pack = newest_pack(backend, "runs/a@2")  # its `weight` and `blob`; `base` lies in the first one's
    backend.delete([pack])
    (finding,) = [finding for finding in check(backend).findings if finding.object == pack]
    (hit,) = finding.hits
    assert [word in hit for word in ("runs/a@2", "paper", "weight", "blob", "base")] == [True] * 4 + [False]
    backend, store = begun()
    for step in range(15):
        store.put_snapshot({"same": torch.arange(5000), "other": step}, ref="runs/many", step=step)
    (pack,) = names(backend, "packs/")
    backend.delete([pack])
    (finding,) = (finding for finding in run_fsck(store.engine, read_data=False).findings)
    assert len(finding.hits) == MAX_HITS + 1
    assert finding.hits[-1] == "and 5 more"


def newest_pack(backend: Backend, address: str) -> str:
    pack = max(reopen(backend).show(address).packs)
    return f"packs/{pack[-2:]}/{pack}"


def test_a_damaged_footer_hits_nothing_that_can_be_read() -> None:
    backend = backend_of(OBJECTS)
    pack = newest_pack(backend, "runs/a@2")
    flip(backend, pack, -20)
    (finding,) = check(backend).findings
    assert (finding.object, finding.hits) == (pack, ())
    assert "intact" in finding.message
    flip(backend, pack, 100)
    (finding,) = check(backend).findings
    assert "runs/a@2" in finding.hits[0]


def test_an_object_that_cannot_be_read_does_not_stop_the_rest_but_an_unreachable_store_does() -> None:
    for bad in (of_kind(kind)[0] for kind in ("snapshots/", "parts/", "log/")):

        def fail(call: str, name: str, bad: str = bad) -> None:
            if name == bad:
                raise BackendUnavailableError(f"cannot read {name}: EIO", object_id=name)

        bad_sector: Any = Watched(backend_of(OBJECTS), fail)
        assert errors(check(bad_sector)) == {bad}
    gone: Any = FaultyBackend(backend_of(OBJECTS), Faults("unavailable", 1, persistent=True), atomic_put=True)
    with pytest.raises(BackendUnavailableError):
        check(gone)


def test_stale_uploads() -> None:
    backend = MemoryBackend(clock=lambda: 1)
    for name, data in OBJECTS.items():
        backend.put(name, data)
    writer = backend.open_writer("packs/ZZ/01M7Y7A2JN6QT6KYB17GC64DZZ")
    writer.append([b"abc"])
    (finding,) = check(backend).findings
    assert (finding.kind, finding.severity) == ("stale_upload", "notice")
    assert abort_stale_uploads(make_engine(backend, CONFIG, MemoryTable(), clock=lambda: 3600), 7200) == []
    assert abort_stale_uploads(make_engine(backend, CONFIG, MemoryTable())) == [finding.object]
    assert check(backend).findings == ()


def test_a_checkpoint_is_compared_with_the_log() -> None:
    backend = backend_of(OBJECTS)
    log = check_log(backend, prefix="log", uuid=None)
    checkpoint = f"checkpoint/{log.last:020d}"
    with log.table.batch() as batch:
        sealed = dump(batch, log.last, log.last_hash or Digest(bytes(32)))
        batch.delete(table_rows.TAGS.prefix + b"paper")
        forged = dump(batch, log.last, log.last_hash or Digest(bytes(32)))
    assert sealed is not None
    assert forged is not None
    flipped = [sealed[:at] + bytes([sealed[at] ^ 4]) + sealed[at + 1 :] for at in range(0, len(sealed), len(sealed) // 8)]
    for wrong in (forged, *flipped):
        backend.replace(checkpoint, wrong)
        (finding,) = check(backend, read_data=False).findings
        assert (finding.object, finding.severity) == (checkpoint, "error")
    backend.replace(checkpoint, sealed)
    assert check(backend).ok
    backend.delete([of_kind("log/")[2]])  # covered by the checkpoint: found, and everything can be read
    assert errors(check(backend)) == {of_kind("log/")[2]}


def test_sealed_objects_that_were_replaced_by_others() -> None:
    """Each is valid for itself, and not what its parent names."""
    backend = backend_of(OBJECTS)
    name = of_kind("snapshots/")[0]
    forged_record = decode_record(OBJECTS[name], name)._replace(metrics={"loss": -1.0}).encode()
    backend.replace(name, forged_record)
    assert errors(check(backend)) == {name}

    backend = backend_of(OBJECTS)
    entry = decode_entry(OBJECTS[of_kind("log/")[3]], "entry", 4)
    forged, _ = seal_entry(4, entry.prev, entry.ops, write_id=entry.write_id, time_ns=entry.time_ns, actor="somebody else")
    backend.replace(of_kind("log/")[3], forged)
    (finding,) = check(backend).findings
    assert (finding.kind, finding.object) == ("broken_log", of_kind("log/")[4])


def test_leftovers_are_notices_and_their_damage_is_reported() -> None:
    backend = backend_of(OBJECTS)
    pack, part, record = (of_kind(kind)[0] for kind in ("packs/", "parts/", "snapshots/"))
    strays = {name: name[:-8] + "ZZZZZZ" + name[-2:] for name in (pack, part, record)}
    for name, stray in strays.items():
        backend.put(stray, OBJECTS[name])
    backend.put("packs/ZZ/01M7Y7A2JN6QT6KYB17GC64DZZ", OBJECTS[pack][:100])
    backend.put("packs/notes.txt", b"hello")
    report = check(backend)
    assert report.ok
    assert {finding.object for finding in report.findings} == {*strays.values(), "packs/ZZ/01M7Y7A2JN6QT6KYB17GC64DZZ", "packs/notes.txt"}
    for stray in strays.values():
        flip(backend, stray, len(read(backend, stray)) // 2)
    damaged = {finding.object for finding in check(backend).findings if finding.kind == "corrupt_object"}
    assert damaged == {*strays.values(), "packs/ZZ/01M7Y7A2JN6QT6KYB17GC64DZZ"}


def test_objects_that_appear_after_the_start_are_not_checked() -> None:
    backend = backend_of(OBJECTS)
    engine = make_engine(backend, CONFIG, MemoryTable(), clock=lambda: 1)
    backend.put("packs/ZZ/01M7Y7A2JN6QT6KYB17GC64DZZ", b"being written")
    assert run_fsck(engine, read_data=True).findings == ()


def test_a_remote_store() -> None:
    """Read by several threads at a time."""
    backend = backend_of(OBJECTS)
    backend.is_local = False
    reports = [replace(check(each), oldest_verified_ns=None) for each in (backend, backend_of(OBJECTS))]
    assert reports[0] == reports[1]
    assert check(backend, read_data=False).blocks == check(backend).blocks
    assert reopen(backend).usage() == reopen(backend_of(OBJECTS)).usage()
    for kind in KINDS[1:]:
        name = of_kind(kind)[0]
        backend.replace(name, OBJECTS[name][:-1])
        assert_found(backend, {name})
        backend.replace(name, OBJECTS[name])
    backend.delete(of_kind("log/")[:2])
    assert salvage(backend).kept == 4
    assert list(failing_roots(backend)) == []


def test_a_listing_that_lags_behind_the_log_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a network folder that another host writes to, and of some object stores."""
    backend, store = begun(1, 2, 3)
    listing = backend.list
    monkeypatch.setattr(backend, "list", lambda prefix: (info for info in listing(prefix) if not info.name.endswith(("2", "3"))))
    assert [finding for finding in store.fsck().findings if finding.severity == "error"] == []


def test_reads_of_the_log_that_are_refused_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a token ends during the check."""
    backend, _ = begun(1, 2, 3)
    asked: list[str] = []
    read_if_there = backend.get_if_there

    def refused(name: str, *, max_bytes: int) -> bytes | None:
        if not name.startswith("log/"):
            return read_if_there(name, max_bytes=max_bytes)
        asked.append(name)
        assert len(asked) < 1000, "it ends"
        raise PermissionDeniedError("refused", object_id=name)

    monkeypatch.setattr(backend, "get_if_there", refused)
    assert check_log(backend, prefix="log", uuid=None).problems
    assert asked
