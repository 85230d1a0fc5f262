"""What a copy brings, what it leaves alone, and that nothing travels twice."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck import ConflictError, InvalidOptionError, NotFoundError, Store
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.opening import read_config
from tensorstore_ck.format.codec import Codec, CodecName
from tensorstore_ck.maintenance.copy_store import copy
from tensorstore_ck.maintenance.salvage import salvage
from tests.gc.stores import AT_ONCE, Clock, interrupted, open_store
from tests.maintenance.copy_store.places import EVERYTHING, Watched, assert_same, contents, empty
from tests.maintenance.fsck.stores import build, is_exact, names, reopen, state
from tests.servers import S3Server


@pytest.mark.parametrize("place", ["memory", pytest.param("s3", marks=pytest.mark.slow)])
def test_all_of_a_store_and_a_copy_of_the_copy(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url, options = f"memory://{tmp_path.name}", dict[str, Any]()
    if place == "s3":
        server: S3Server = request.getfixturevalue("moto_server")
        url, options = f"{server.url}/{tmp_path.name}", {"storage_options": server.storage_options}
    source = reopen(build())
    with tsck.open(url, create=True, cache_dir=tmp_path / "cache", **options) as target:
        report = copy(source, target)
        assert report.ok
        assert (report.snapshots, report.snapshots_there, report.warnings) == (4, 0, ())
        assert [(ref.name, ref.kind, ref.outcome, ref.snapshots) for ref in report.refs] == [
            ("runs/a", "branch", "copied", 3),
            ("runs/b", "branch", "copied", 1),
            ("paper", "tag", "copied", 0),
        ]
        assert {ref.name: ref.root for ref in report.refs} == {
            name: snap.root for name, snap in {**source.branches(), **source.tags()}.items()
        }
        last = reopen(empty())
        copy(target, last)
        for each in (target, last):
            assert_same(source, each)
            assert [record[1:] for record in records(each)] == [record[1:] for record in records(source)]


def records(store: Store) -> list[tuple[object, ...]]:
    view = store.engine.log.view()
    found = (store.engine.read_record(info) for snapshot in store.log() if (info := view.by_root(bytes.fromhex(snapshot.root))) is not None)
    return sorted(
        (str(record.step), record.step, record.parent, record.metadata, record.metrics, record.time_ns, record.part_ids) for record in found
    )


def test_a_copy_is_as_old_as_its_source_and_its_undo_windows_are_not() -> None:
    clock = Clock()
    source, target = open_store(clock=clock), open_store(clock=clock)
    for step in range(5):
        source.put_snapshot(state(step), ref="runs/a", step=step, triggers=["at_steps"] if step == 1 else [], epoch=float(step))
        clock.advance(86_400)
    assert copy(source, target).ok
    made, copied = ([(each.time_ns, each.triggers, each.epoch) for each in store.log("runs/a")] for store in (source, target))
    assert made == copied
    assert {each.arrived_ns for each in target.log("runs/a")} == {clock()}
    target.set_policy("runs/*", keep_younger="60h")
    assert target.apply_policies().going == 2  # step 0 is kept by nothing, and step 1 is a milestone
    clock.advance(3600)
    target.gc()
    assert target.undo("runs/a@0")


def test_a_snapshot_is_copied_with_the_branch_that_it_was_saved_to() -> None:
    """Also where branches whose names come first moved to it: by `reset`, as forks, and forks of forks."""
    source, target = open_store(), open_store()
    source.put_snapshot(state(8), ref="best", step=0)
    for step in range(4):
        source.put_snapshot(state(step), ref="runs/z", step=step)
        source.reset("best", "runs/z")
    for name, at in (("fork", "runs/z@2"), ("a", "fork")):
        source.branch(name, at)
        source.put_snapshot(state(9), ref=name, step=3, expect=tsck.ANY)
        source.put_snapshot(state(10), ref=name, step=4)
    assert [each.name for each in copy(source, target).refs] == ["a", "best", "fork", "runs/z"]
    for name in source.branches():
        assert [(each.root, each.ref) for each in target.log(name)] == [(each.root, each.ref) for each in source.log(name)]
    watched = target.watch("runs/z", since_step=0, pin_for=None)
    assert [next(watched).step for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_salvaged_copy_keeps_both_times(lost: int) -> None:
    """Of a branch, and of a snapshot that a tag alone holds. Of one whose own entry is lost the arrival is not known."""
    clock, backend = Clock(), MemoryBackend()
    source, target = open_store(clock=clock), open_store(backend, clock=clock)
    for step in range(3):
        source.put_snapshot(state(step), ref=f"runs/{step % 2}", step=step)
        clock.advance(86_400)
    assert copy(source, target).ok
    times = {each.id: (each.time_ns, each.time_ns if each.entry == lost else each.arrived_ns) for each in target.log()}
    target.tag("kept", "runs/1")
    target.forget("runs/1")
    target.gc(AT_ONCE)
    clock.advance(3600)
    backend.delete([sorted(info.name for info in backend.list("log/"))[lost - 1]])
    assert salvage(backend, clock=clock).log
    found = open_store(backend, clock=clock)
    assert {each.id: (each.time_ns, each.arrived_ns) for each in (*found.log(), found.resolve("kept"))} == times


def test_by_url(tmp_path: Path) -> None:
    build(LocalBackend(str(tmp_path / "source")))
    tsck.open(tmp_path / "target", create=True).close()
    assert copy(tmp_path / "source", str(tmp_path / "target"), refs="runs/a").snapshots == 3
    with tsck.open(tmp_path / "target") as target:
        assert is_exact(target.checkout("runs/a@2"), 2)
        assert list(target.branches()) == ["runs/a"]


def test_a_history_that_went_back_after_a_copy_too() -> None:
    source, target = reopen(build()), reopen(empty())
    source.reset("runs/a", "runs/a@1")
    for ref, number in (("runs/a", 5), ("runs/b", 5)):
        source.checkout(ref)
        source.put_snapshot(state(number), ref=ref, step=number)
    copy(source, target)
    assert [snap.step for snap in target.log("runs/a")] == [5, 1, 3, 2, 1]
    assert contents(source) == contents(target)
    source.put_snapshot(state(6), ref="runs/b", step=6)
    source.reset("runs/b", "runs/b@5")
    source.checkout("runs/b")
    source.put_snapshot(state(7), ref="runs/b", step=7)
    copy(source, target)
    assert [snap.step for snap in target.log("runs/b")] == [7, 5, 6, 5, 4, 1]


@pytest.mark.parametrize(("codec", "used"), [("raw", {Codec.RAW, Codec.LZ4}), ("fast", {Codec.PLANES, Codec.LZ4})])
def test_encoded_blocks_travel_as_they_are(codec: CodecName, used: set[Codec]) -> None:
    source, target = reopen(build(codec=codec)), reopen(empty())
    copy(source, target)

    def extents(store: Store) -> list[tuple[int, int, int]]:
        engine = store.engine
        info = engine.log.newest_view().by_root(bytes.fromhex(store.resolve("runs/a").root))
        assert info is not None
        rows = engine.read_part(engine.read_record(info), 0).extents
        return [(int(row["stored"]), int(row["raw"]), int(row["codec"])) for row in rows]

    assert extents(source) == extents(target)
    assert {number for _, _, number in extents(source)} == used


def test_a_second_copy_moves_nothing_but_new_blocks() -> None:
    source_backend, target_backend = build(codec="raw"), empty()
    copy(reopen(source_backend), reopen(target_backend))
    source, target = Watched(source_backend), Watched(target_backend)
    report = copy(reopen(source), reopen(target))
    assert (report.snapshots, report.snapshots_there, report.blocks, report.read_bytes, report.written_bytes) == (0, 4, 0, 0, 0)
    assert {ref.outcome for ref in report.refs} == {"there"}
    assert source.bytes_read == target.bytes_read == 0
    assert source.writes() == target.writes() == []
    with reopen(source_backend) as store:
        store.checkout("runs/a", allow_marked=True)
        new = store.put_snapshot({**state(3), "weight": torch.full((1500,), 9.0)}, ref="runs/a", step=6, codec="raw")
    report = copy(reopen(source), reopen(target_backend))  # without a cache: by what the parent's part says
    assert (report.snapshots, report.blocks, report.read_bytes, source.bytes_read) == (1, 1, 6000, 6000)
    assert report.written_bytes < 6000 + 3000
    copied = reopen(target_backend).resolve("runs/a")
    assert (copied.root, copied.new_bytes < 6000 + 3000) == (new.root, True)


def test_blocks_are_shared_between_branches() -> None:
    backend = empty()
    with reopen(backend) as store:
        store.put_snapshot(state(1), ref="one")
        store.put_snapshot({**state(1), "bias": torch.zeros(3)}, ref="two")
    report = copy(reopen(backend), reopen(empty()))
    assert (report.snapshots, report.blocks, report.blocks_there) == (2, 4, 4)  # layout, blob and two tensors


def test_what_the_target_forgot_comes_back() -> None:
    """From the list of what is to be deleted: nothing travels, and gc does not take it any more."""
    source, target = reopen(build()), reopen(empty())
    copy(source, target)
    target.untag("paper")
    target.forget("runs/a", "runs/b")
    assert target.gc(dataclasses.replace(EVERYTHING, grace_seconds=1e6)).waiting
    assert copy(source, target).blocks == 0
    target.gc(EVERYTHING)
    target.gc(EVERYTHING)
    assert_same(source, target)


def test_marks_travel_with_their_snapshot_and_what_was_said_later_follows() -> None:
    source, target = reopen(build()), reopen(empty())
    copy(source, target)
    bad = bytes.fromhex(source.resolve("runs/a@3").root)
    (entry,) = [entry for entry in target.engine.log.entries() if any(op.fields.get("root") == bad for op in entry.ops)]
    assert [op.name for op in entry.ops] == ["put", "annotate", "mark"], "it is never there unmarked"
    source.annotate("runs/a@1", {"late": 1.5, "odd": float("nan")})
    source.mark("runs/a@2", reason="diverged")
    copy(source, target)
    assert target.resolve("runs/a@1").metrics["late"] == 1.5
    assert (target.resolve("paper").mark, target.resolve("paper").reason) == ("bad", "diverged")
    entries = target.engine.log.sync().n
    copy(source, target)
    assert target.engine.log.sync().n == entries


def test_globs() -> None:
    backend = empty()
    target = reopen(backend)
    report = copy(reopen(build()), target, refs=["*/b", "pap*"])
    assert [ref.name for ref in report.refs] == ["runs/b", "paper"]
    assert (list(target.branches()), list(target.tags())) == (["runs/b"], ["paper"])
    assert is_exact(target.checkout("runs/b~1"), 1)
    watched = Watched(backend)
    with pytest.raises(NotFoundError, match=r"matches 'run/\*' \(refs: runs/a, runs/b, paper\)"):
        copy(reopen(build()), reopen(watched), refs=["runs/*", "run/*"])
    assert watched.writes() == []
    with pytest.raises(NotFoundError, match="it has no refs yet"):
        copy(reopen(empty()), reopen(empty()), refs="*")
    assert copy(reopen(empty()), reopen(empty())).refs == ()


def test_a_tag_alone() -> None:
    source, target_backend = reopen(build()), empty()
    target = reopen(target_backend)
    copy(source, target, refs="paper")
    assert list(target.branches()) == []
    assert target.forgotten() == ()
    assert target.resolve("paper").root == source.resolve("paper").root
    target.gc(EVERYTHING)
    assert is_exact(reopen(target_backend).checkout("paper"), 2)
    copy(source, target)
    assert_same(source, target)
    target.untag("paper")
    target.forget("runs/a", "runs/b")
    target.gc(EVERYTHING)
    assert names(target_backend, "packs/") == []


def test_stores_that_cannot_be_copied_between(tmp_path: Path) -> None:
    backend, target = build(), empty()
    with pytest.raises(InvalidOptionError, match="are the same store"):
        copy(reopen(backend), reopen(backend))
    with pytest.raises(tsck.NotAStoreError, match="tsck init"):
        copy(reopen(backend), tmp_path / "nothing")
    config = read_config(target)
    assert config is not None
    target.replace("store.json", dataclasses.replace(config, block_bytes=1 << 20).encode())
    with pytest.raises(InvalidOptionError, match="block size"):
        copy(reopen(backend), reopen(target))


def test_diverged() -> None:
    source, target = reopen(build()), reopen(empty())
    copy(source, target)
    target.checkout("runs/a", allow_marked=True)
    target.put_snapshot(state(7), ref="runs/a", step=7)
    source.checkout("runs/a", allow_marked=True)
    source.put_snapshot(state(8), ref="runs/a", step=8)
    source.checkout("runs/b")
    source.put_snapshot(state(9), ref="runs/b", step=9)
    before = target.log("runs/a")
    with pytest.raises(ConflictError, match="'runs/a' diverged") as caught:
        copy(source, target)
    assert caught.value.object_id == "runs/a"
    assert target.log("runs/a") == before
    assert is_exact(target.checkout("runs/b@9"), 9)
    target.branch("ours/a", "runs/a")  # as the message says
    target.forget("runs/a")
    assert copy(source, target).ok
    assert [snap.step for snap in target.log("runs/a")] == [8, 3, 2, 1]


def test_the_target_is_ahead() -> None:
    source, target = reopen(build()), reopen(empty())
    copy(source, target)
    target.checkout("runs/b")
    target.put_snapshot(state(7), ref="runs/b", step=7)
    target.put_snapshot(state(8), ref="runs/b", step=8)
    target.forget("runs/b@4")
    report = copy(source, target)
    assert {ref.name: ref.outcome for ref in report.refs} == {"runs/a": "there", "runs/b": "ahead", "paper": "there"}
    assert target.resolve("runs/b").step == 8
    copy(target, source)  # and back
    assert source.resolve("runs/b").root == target.resolve("runs/b").root


def test_what_the_source_forgot_stays_in_the_target() -> None:
    source, target = reopen(build()), reopen(empty())
    copy(source, target, refs="runs/b")
    source.checkout("runs/b")
    for number in (5, 6, 7):
        source.put_snapshot(state(number), ref="runs/b", step=number)
    source.forget("runs/b@4", "runs/b@5")
    source.gc(EVERYTHING)
    source.gc(EVERYTHING)
    report = copy(source, target, refs="runs/b")
    assert report.ok
    assert [snap.step for snap in target.log("runs/b")] == [7, 6, 4, 1]
    assert is_exact(target.checkout("runs/b@4"), 4)


@pytest.mark.parametrize("kind", ["tag", "branch"])
def test_a_tag_that_is_taken(kind: str) -> None:
    source, target = reopen(build()), reopen(empty())
    copy(source, target, refs="runs/*")
    getattr(target, kind)("paper", "runs/a@1")
    with pytest.raises(ConflictError, match="tag 'paper' was not copied"):
        copy(source, target)
    assert target.resolve("paper").step == 1
    target.tag("runs/c", "runs/a@1")
    source.branch("runs/c", "runs/a@2")
    with pytest.raises(ConflictError, match="a tag in"):
        copy(source, target, refs="runs/c")


@pytest.mark.race
def test_a_ref_that_moves_meanwhile() -> None:
    source, backend = reopen(build()), empty()
    other = reopen(backend)
    target, _ = interrupted(backend, "put snapshots/", lambda: other.put_snapshot(state(9), ref="runs/a", step=9))
    with pytest.raises(ConflictError, match="moved in memory: by another process"):
        copy(source, target)
    assert [snap.step for snap in other.log("runs/a")] == [9]
    assert is_exact(other.checkout("runs/b@4"), 4)
