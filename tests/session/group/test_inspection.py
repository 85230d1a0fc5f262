"""`show` and `diff` of snapshots of many ranks, for the program and on the command line."""

import gc
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path

import pytest

import tensorstore_ck as tsck_package
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import ulid_text
from tensorstore_ck.engine.interfaces import CapturedState, ListedSources
from tensorstore_ck.format.layout import ExplicitRegions, Layout, TensorSpec
from tensorstore_ck.format.part import decode_part, part_name
from tensorstore_ck.format.record import decode_record, record_name
from tensorstore_ck.format.sharding import BoxBounds, Mesh, Shard
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.store import Store
from tests.gc.stores import open_store
from tests.session.group.built import MESHES, OBJECTS, PARTS, RANKS, Counting, Reads, copy, on_disk, stage, tensors
from tests.session.group.states import BytesSource, Spreading, captured, cut, sharded, whole
from tests.session.group.stores import put_all, rank_state


def test_show() -> None:
    details = open_store(copy(OBJECTS)).show("job@1")
    own = [(f"rank_state[{rank}].rng", "np:<i4", (2000,), 8000) for rank in range(RANKS)]
    assert details.tensors == (*((name, "np:<i4", each.whole.shape, each.whole.nbytes) for name, each in tensors().items()), *own)
    values = [("text", "text"), ("step", 1)]
    assert list(details.values.values()) == [*(value for _, value in values), *range(RANKS)]
    assert details.ranks == RANKS
    assert details.placements == {
        "fsdp": "S(0) on 4",
        "tp": "S(0),S(1) on 2x2",
        "hsdp": "R,S(0) on 2x2",
        "small": "S(0) on 4",
        "one": "S(0) on 4",
    }
    parts = [decode_part(OBJECTS[name], name) for name in PARTS]
    places = {(part.packs[row["pack"]], int(row["entry"])): int(row["stored"]) for part in parts for row in part.extents}
    assert details.stored_bytes == sum(places.values())
    assert set(details.packs) == {ulid_text(pack) for pack, _ in places}


def test_diff_of_one_spread() -> None:
    backend = Counting(copy(OBJECTS))
    store = open_store(backend)
    backend.read_bytes = 0
    diff = store.diff("job@1", "job@2")
    assert backend.read_bytes < 5000  # layouts
    own = [(f"rank_state[{rank}].rng", 8000) for rank in range(RANKS)]
    changed = [(name, tensors()[name].whole.nbytes) for name in ("tp", "hsdp", "one")]
    assert [(change.name, change.changed_bytes) for change in diff.tensors] == [*changed, *own]
    assert [(change.path, change.old, change.new) for change in diff.values] == [("7", 1, 2)]
    assert (diff.unchanged_tensors, diff.unchanged_values) == (3, 1 + RANKS)
    assert not diff.layout_changed


@pytest.mark.parametrize("ranks", [1, 3])
def test_diff_of_other_ranks(ranks: int) -> None:
    """Where the borders are others, what the tensors hold is compared."""
    backend = copy(OBJECTS)
    mesh = (Mesh((ranks,), tuple(range(ranks))),)

    def other(rank: int, step: int = 1) -> CapturedState:
        spread = {name: Spreading(each.whole, sharded(0, Shard(each.whole.ndim - 1))) for name, each in tensors(step).items()}
        changed = spread["small"].whole.copy()
        changed[5] += 1
        spread["small"] = Spreading(changed, None)
        return captured(spread, mesh, rank, ranks, ["text", 1])

    put_all(backend, ranks, other, ref="other")
    diff = open_store(backend).diff("job@1", "other")
    assert [(change.name, change.change, change.changed_bytes) for change in diff.tensors] == [
        ("small", "changed", 1),
        *((f"rank_state[{rank}].rng", "removed", 0) for rank in range(RANKS)),
    ]
    assert diff.layout_changed
    put_all(backend, ranks, lambda rank: other(rank, 2), ref="other", step=2)
    diff = open_store(backend).diff("job@1", "other")
    assert [change.name for change in diff.tensors if change.change == "changed"] == ["tp", "hsdp", "small", "one"]
    sizes = {change.name: change.changed_bytes for change in diff.tensors}
    assert all(sizes[name] == tensors()[name].whole.nbytes for name in ("tp", "hsdp", "one"))


def test_diff_does_not_read_what_lies_between_the_same_borders() -> None:
    inner = MemoryBackend()
    open_store(inner)
    each = Spreading(whole((1 << 10, 1 << 11)), sharded(0, Shard(0)))  # 8 MiB: a block of 4 MiB for each of two ranks
    for ranks in (2, 1):
        put_all(inner, ranks, partial(captured, {"w": each}, [Mesh((ranks,), tuple(range(ranks)))], ranks=ranks), ref=f"on{ranks}")
    backend = Counting(inner)
    store = open_store(backend)
    backend.read_bytes = 0
    assert store.diff("on2", "on1").tensors == ()
    assert backend.read_bytes < 2000


def test_placements_of_other_kinds() -> None:
    backend = MemoryBackend()
    open_store(backend)
    strided = {"strided": Spreading(whole((16, 100)), sharded(0, Shard(0, 2), Shard(0)))}
    put_all(backend, RANKS, lambda rank: captured(strided, MESHES, rank, RANKS, []), ref="strided")
    assert open_store(backend).show("strided").placements == {"strided": "_S(0, 2),S(0) on 2x2"}
    put_all(backend, RANKS, stage, ref="stages")
    details = open_store(backend).show("stages")
    assert details.placements == {"first": "S(0) on 2", "tied": "S(0) on 2", "second": "S(0) on 2", "told": "boxes"}
    assert details.tensors == tuple(
        (name, "np:<i4", shape, 4 * prod(shape))
        for name, shape in (("first", (3000, 4)), ("tied", (1500,)), ("told", (5000,)), ("second", (500, 9)))
    )
    assert (details.ranks, list(details.values.values())) == (RANKS, [0, 1])


def test_diff_of_regions_that_the_parts_tell() -> None:
    """One rank holds another region than before: the elements are compared, though the layouts are the same."""
    backend = MemoryBackend()
    open_store(backend)

    def told(rank: int, border: int, step: int) -> CapturedState:
        box = BoxBounds((0,), (border,)) if rank == 0 else BoxBounds((border,), (5000 - border,))
        array = whole((5000,))
        array[4500] += step
        layout = Layout([TensorSpec("told", "np:<i4", 4, (5000,))], ["l", [0]], (), (), ["boxes"])
        return CapturedState(layout, [], (), ListedSources([BytesSource(cut(array, box))]), [ExplicitRegions(0, (box,))])

    for step, (border, change) in enumerate([(2500, 0), (2500, 1), (2000, 1), (2000, 0)]):
        put_all(backend, 2, partial(told, border=border, step=change), step=step)
    store = open_store(backend)
    assert [(change.name, change.changed_bytes) for change in store.diff("job@0", "job@1").tensors] == [("told", 10_000)]
    assert store.diff("job@1", "job@2").tensors == ()
    assert [(change.name, change.changed_bytes) for change in store.diff("job@1", "job@3").tensors] == [("told", 12_000)]


@pytest.fixture
def frozen() -> Iterator[None]:
    """So that it is fast to look at all objects that a test makes."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
def test_parts_are_opened_one_after_another() -> None:
    """However many ranks there are; and those that did not change are not read for a diff."""
    ranks = 16
    backend = MemoryBackend()
    open_store(backend)
    each = Spreading(whole((ranks * 300, 5)), sharded(0, Shard(0)))

    def put(step: int) -> SnapshotRow:
        changed = each.whole.copy()
        changed[-1, -1] += step
        spread = {"w": Spreading(changed, each.spread)}
        mesh = [Mesh((ranks,), tuple(range(ranks)))]
        return put_all(backend, ranks, lambda rank: captured(spread, mesh, rank, ranks), rank_state, step=step)

    infos = [put(step) for step in (1, 2)]
    gc.collect()
    gc.freeze()  # what the ranks still have
    looks: list[Callable[[Store], object]] = [
        lambda store: store.show("job"),
        lambda store: store.diff("job@1", "job@2"),
        lambda store: store.fsck(),
        lambda store: store.usage(),
    ]
    for look in looks:
        watched = Reads(backend, counts_parts=True)
        assert look(open_store(watched))
        assert watched.most <= 12  # two snapshots, the last four that were read, and what is at hand
    watched = Reads(backend)
    diff = open_store(watched).diff("job@1", "job@2")
    assert [(change.name, change.changed_bytes) for change in diff.tensors] == [("w", 6000)]
    for info in infos:
        record = decode_record(backend.get(record_name(info.ulid), max_bytes=1 << 30), "record")
        shared = [watched.reads[part_name(ulid)] for ulid in record.parts[:ranks]]
        assert [count > 0 for count in shared] == [True, *[False] * (ranks - 2), True]
        assert watched.reads[record_name(info.ulid)] == 1


def test_on_the_command_line(tmp_path: Path) -> None:
    tsck = on_disk(tmp_path)
    shown = tsck("show", "job@1")
    assert re.search(r"^ranks +4$", shown, re.MULTILINE)
    assert re.search(r"^ *hsdp .* 300x30 .* R,S\(0\) on 2x2$", shown, re.MULTILINE)
    assert re.search(r"^ *rank_state\[3\]\.rng .* 2000 .*KiB *$", shown, re.MULTILINE)
    assert json.loads(tsck("show", "job@1", "--json"))["placements"]["tp"] == "S(0),S(1) on 2x2"
    assert [row["step"] for row in json.loads(tsck("log", "job", "--json"))] == [2, 1]
    changed = re.findall(r"^ *(\S+) +changed +np:", tsck("diff", "job@1", "job@2"), re.MULTILINE)
    assert changed == ["tp", "hsdp", "one", *(f"rank_state[{rank}].rng" for rank in range(RANKS))]
    assert json.loads(tsck("usage", "--json"))["snapshots"] == 2
    with tsck_package.open(tmp_path / "ck", cache_dir=tmp_path / "cache") as store:
        store.put_snapshot({"x": whole((3,))}, ref="one")
    assert "PLACEMENT" not in tsck("show", "one")
