"""Usage compared with numbers computed by hand from the saves."""

from collections.abc import Callable

import pytest
import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.gc.byte_sums import ByteSums, HolderBytes
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store
from tests.gc import stores

COMMON = torch.arange(4000, dtype=torch.float32)
OWN = [torch.full((2000,), float(number)) for number in range(4)]
SMALL = torch.zeros(8)


def open_store(backend: MemoryBackend) -> Store:
    config = read_config(backend) or init_store(backend)
    return Store(make_engine(backend, config, MemoryTable()))


def size(backend: MemoryBackend, *folders: str) -> int:
    return sum(info.size_bytes for folder in folders for info in backend.list(folder))


def make() -> tuple[MemoryBackend, Store]:
    """runs/a: 0, 1; runs/b: 2; tag: 1. The first 16,000 bytes of each are the same."""
    backend = MemoryBackend()
    store = open_store(backend)
    for number, ref in ((0, "runs/a"), (1, "runs/a"), (2, "runs/b")):
        store.put_snapshot({"common": COMMON, "own": OWN[number], "small": SMALL}, ref=ref, step=number, codec="raw")
    store.tag("best", "runs/a@1")
    return backend, store


def layout_sizes(store: Store) -> tuple[int, int]:
    """(raw, stored) bytes of the layout: the same block in each snapshot."""
    from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader

    store.engine.log.sync()
    info = next(store.engine.log.view().snapshots())
    extent = SnapshotReader(store.engine, info).part.extents[0]
    return int(extent["raw"]), int(extent["stored"])


def test_bytes_per_ref_and_in_all() -> None:
    backend, store = make()
    usage = store.usage()
    raw, stored = layout_sizes(store)
    objects = {step: object_bytes(backend, store, f"{ref}@{step}") for step, ref in ((0, "runs/a"), (1, "runs/a"), (2, "runs/b"))}
    refs = {ref.ref: ref for ref in usage.refs}
    logical = 16_000 + 8_000 + 32

    a = refs["runs/a"]
    assert (a.snapshots, a.logical_bytes) == (2, 2 * logical)
    assert a.unique_bytes == 16_000 + 2 * 8_000 + raw + 2 * 32
    assert a.stored_bytes == 16_000 + 2 * 8_000 + stored + objects[0] + objects[1]
    assert a.shared_bytes == 16_000 + 8_000 + stored + objects[1]  # with the tag, and the common block with runs/b

    b = refs["runs/b"]
    assert (b.snapshots, b.logical_bytes) == (1, logical)
    assert b.unique_bytes == logical + raw
    assert b.stored_bytes == 16_000 + 8_000 + stored + objects[2]
    assert b.shared_bytes == 16_000 + stored

    tag = refs["best"]
    assert (tag.snapshots, tag.stored_bytes, tag.shared_bytes) == (1, 24_000 + stored + objects[1], 24_000 + stored + objects[1])

    assert (usage.snapshots, usage.logical_bytes) == (3, 3 * logical)
    assert usage.unique_bytes == 16_000 + 3 * 8_000 + raw + 3 * 32
    assert usage.stored_bytes == 16_000 + 3 * 8_000 + stored + sum(objects.values())
    assert usage.shared_bytes == 16_000 + 8_000 + stored + objects[1]
    assert usage.objects_bytes == size(backend, "") - backend.size("store.json")
    assert usage.unreferenced_bytes == 0

    store.branch("again", "runs/a@0")
    for step in (1, 0):
        store.reset("again", f"runs/a@{step}")
    again = next(ref for ref in store.usage().refs if ref.ref == "again")
    assert (again.snapshots, again.shared_bytes) == (2, again.stored_bytes), "each counts once, however often it is in a history"


def object_bytes(backend: MemoryBackend, store: Store, address: str) -> int:
    """A snapshot's record and part."""
    from tensorstore_ck.format.part import part_name
    from tensorstore_ck.format.record import record_name
    from tensorstore_ck.log.address import resolve

    info = resolve(store.engine.log.view(), address).info
    (part,) = store.engine.read_record(info).parts
    return backend.size(record_name(info.ulid)) + backend.size(part_name(part))


def test_what_no_ref_refers_to() -> None:
    backend, store = make()
    before = store.usage()
    pack = next(info for info in backend.list("packs/"))
    stray = pack.name[:-8] + "ZZZZZZ" + pack.name[-2:]
    backend.put(stray, backend.get(pack.name, max_bytes=1 << 30))
    backend.put(f"parts/00/{stray[-26:]}", b"12345")
    after = store.usage()
    assert after.unreferenced_bytes == pack.size_bytes + 5
    assert after.stored_bytes == before.stored_bytes


def test_a_block_that_no_snapshot_needs_in_a_pack_that_one_does() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    store.put_snapshot({"big": torch.arange(9000), "small": torch.arange(700)}, ref="runs/a")
    other = open_store(copy_without_log(backend))
    other.put_snapshot({"small": torch.arange(700)}, ref="runs/a")
    assert other.usage().unreferenced_bytes == size(backend, "packs/", "parts/", "snapshots/")


def copy_without_log(backend: MemoryBackend) -> MemoryBackend:
    copied = MemoryBackend()
    for info in backend.list(""):
        if not info.name.startswith("log/"):
            copied.put(info.name, backend.get(info.name, max_bytes=1 << 30))
    return copied


def test_all_refs_are_summed_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, store = make()
    passes: list[int] = []
    sums = ByteSums.sums

    def noted(self: ByteSums, chosen: Callable[[int], bool | int]) -> HolderBytes:
        def counted(mask: int) -> bool | int:
            passes.append(mask)
            return chosen(mask)

        return sums(self, counted)

    monkeypatch.setattr(ByteSums, "sums", noted)
    store.usage()
    few = len(passes)
    for number in range(9):
        store.tag(f"runs/{number}", "runs/a@1")
    passes.clear()
    usage = store.usage()
    assert len(usage.refs) == 12
    assert len(passes) <= 2 * few


def test_an_empty_store() -> None:
    usage = open_store(MemoryBackend()).usage()
    assert (usage.refs, usage.snapshots, usage.stored_bytes, usage.unreferenced_bytes) == ((), 0, 0, 0)


def test_after_compaction_blocks_count_where_they_are_now() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    stores.put_all(store, "runs/a", [stores.state(*range(20)), stores.state(0, 7)])
    store.forget("runs/a@1")
    assert {pack.live_ratio for pack in store.usage().packs} == {1.0}  # by the undo window
    before = store.usage()
    assert before.undo_bytes > 18 * stores.TENSOR_BYTES
    assert store.gc(stores.AT_ONCE).rewritten
    after = store.usage(per_snapshot=True)

    moved = size(backend, "moved/")
    assert moved > 0
    assert (after.stored_bytes, after.unreferenced_bytes, after.undo_bytes) == (before.refs[0].stored_bytes + moved, 0, 0)
    assert after.refs[0].exclusive_bytes == after.stored_bytes
    assert [row.exclusive_bytes for row in after.by_snapshot or ()] == [after.stored_bytes]
    assert sum(pack.live_bytes for pack in after.packs) == after.stored_bytes - size(backend, "moved/", "parts/", "snapshots/")
    assert {pack.live_ratio for pack in after.packs} == {1.0}


def test_what_a_snapshot_has_alone_is_what_gc_frees() -> None:
    """In packs whose blocks are all freed, without headers and footers."""
    backend = MemoryBackend()
    store = open_store(backend)
    stores.put_all(store, "runs/a", [stores.state(1, 2), stores.state(1, 2, 3), stores.state(1, 4)])
    rows = {row.step: row for row in store.usage(per_snapshot=True).by_snapshot or ()}
    assert rows[2].exclusive_bytes > stores.TENSOR_BYTES
    before = store.usage()
    store.forget("runs/a@2")
    store.gc(stores.AT_ONCE)
    assert before.stored_bytes - store.usage().stored_bytes == rows[2].exclusive_bytes
