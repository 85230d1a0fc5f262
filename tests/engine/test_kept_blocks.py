"""The bases of differences of blocks that change little stay in memory: only the first such save reads them from the store."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.byte_cache import ByteCache
from tensorstore_ck.engine.engine import KEPT_SHARE
from tensorstore_ck.errors import NoSpaceError
from tensorstore_ck.format.codec import Codec
from tensorstore_ck.log.cache.lmdb_table import LmdbView
from tests.feed.versions import REF, NotedFaults, copy_of, equal, first_state, follower, save, train


def test_a_save_of_few_changes_reads_no_block_but_the_first_time() -> None:
    faults, state = NotedFaults(), first_state()
    store = follower(MemoryBackend(), faults)
    reads, sizes = list[int](), list[int]()
    for step in range(5):
        faults.noted.clear()
        sizes.append(save(store, state, step).new_bytes)
        reads.append(sum(what.startswith("read packs/") for what in faults.noted))
        last = copy_of(state)
        train(state, step, 0.01 if step != 2 else 1.0)  # of what changed everywhere, the base is kept
        assert equal(store.checkout(REF), last)
    assert reads[1] >= 3
    assert reads[2] == reads[3] == reads[4] == 0
    assert sizes[2] < sizes[0] / 5


def test_bases_of_differences_that_change_everything_are_read_once_and_others_not_again() -> None:
    """Of random numbers a sample is kept: it shows that a difference is not worth reading them. Each fourth block is stored in full."""
    faults, generator = NotedFaults(), torch.Generator().manual_seed(0)
    store, reads, codecs = follower(MemoryBackend(), faults), list[int](), list[int]()
    weights = torch.randn(400, 128, generator=generator)
    for step in range(6):
        state = {"model": {"weights": weights, "random": torch.randn(400, 128, generator=generator)}}
        faults.noted.clear()
        store.put_snapshot(state, ref=REF, step=step, delta=4)
        reads.append(sum(what.startswith("read packs/") for what in faults.noted))
        kept = [len(block.raw) for block in store.engine.kept_blocks._kept.values()]
        codecs.append([*store.engine._parts.values()][-1].extents["codec"].tolist().count(Codec.DELTA))
        assert kept == ([weights.nbytes] if codecs[-1] else [])
        assert equal(store.checkout(REF), state)
        weights = weights + torch.randn(weights.shape, generator=generator) * 1e-4
    assert codecs == [0, 1, 1, 1, 0, 1]
    assert reads == [0, 2, 0, 0, 0, 1]


def test_a_base_that_was_harmed_in_memory_is_read_again() -> None:
    faults, generator = NotedFaults(), torch.Generator().manual_seed(0)
    store, state = follower(MemoryBackend(), faults), {"model": {"weights": torch.randn(400, 128, generator=generator)}}
    for step in range(4):
        if step == 3:
            (kept,) = store.engine.kept_blocks._kept.values()
            kept.raw[0] ^= 1
        faults.noted.clear()
        save(store, state, step)
        assert (len([what for what in faults.noted if what.startswith("read packs/")]) == 1) == (step in (1, 3))
        assert equal(store.checkout(REF), state)
        state["model"]["weights"] += torch.randn(400, 128, generator=generator) * 1e-4


def test_a_base_that_became_the_block_in_memory_is_no_base_any_more() -> None:
    """Few changes are applied in the memory of the base; if they are so random that the difference is large, the next base is not there."""
    generator = torch.Generator().manual_seed(0)
    bytes_of_noise = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, generator=generator)
    store = follower(MemoryBackend())
    sizes = list[int]()
    for share in (0.0, 0.01, 0.09, 0.09, 0.3, 0.01):
        chosen = torch.rand(bytes_of_noise.shape, generator=generator) < share
        noise = torch.randint(1, 256, bytes_of_noise.shape, dtype=torch.uint8, generator=generator)
        bytes_of_noise = torch.where(chosen, bytes_of_noise + noise, bytes_of_noise)
        state = {"model": {"noise": bytes_of_noise}}
        sizes.append(save(store, state, len(sizes)).new_bytes)
        assert equal(store.checkout(REF), state)
    assert sizes[1] < 0.1 * len(bytes_of_noise) < sizes[2] < 0.2 * len(bytes_of_noise)


def test_a_branch_that_is_not_saved_any_more_makes_room() -> None:
    faults, state = NotedFaults(), first_state()
    store = follower(MemoryBackend(), faults)
    size_bytes = sum(tensor.nbytes for tensor in state["model"].values())
    store.engine.kept_blocks = ByteCache(lambda: size_bytes * 3 // 2, lambda kept: len(kept.raw))
    for step, ref in enumerate(["runs/a"] * 3 + ["runs/b"] * 5):
        faults.noted.clear()
        store.put_snapshot(state, ref=ref, step=step, delta=True)
        train(state, step)
    assert not [what for what in faults.noted if what.startswith("read packs/")]


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_branches_that_are_saved_in_turns_keep_their_bases(share: float) -> None:
    faults, generator = NotedFaults(), torch.Generator().manual_seed(0)
    store = follower(MemoryBackend(), faults)
    weights = [torch.randn(400, 128, generator=generator) for _ in range(4)]
    for step in range(5):
        faults.noted.clear()
        for number, held in enumerate(weights):
            store.put_snapshot({"model": {"weights": held}}, ref=f"runs/{number}", step=step, delta=8)
            chosen = torch.rand(held.shape, generator=generator) < share
            held += chosen * torch.randn(held.shape, generator=generator) * 1e-4
        assert len([what for what in faults.noted if what.startswith("read packs/")]) == (4 if step == 1 else 0)


def test_less_is_kept_where_less_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    store, state = follower(MemoryBackend()), first_state()
    monkeypatch.setattr("tensorstore_ck.engine.write.delta_bases.free_bytes", lambda: 0)
    for step in range(3):
        save(store, state, step)
        train(state, step)
    assert not store.engine.kept_blocks._kept


def test_what_is_kept_is_bounded_and_verified_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    faults, state, block_bytes = NotedFaults(), first_state(), 64 * 128 * 2
    store = follower(MemoryBackend(), faults)
    cache = store.engine.kept_blocks = ByteCache(lambda: block_bytes, lambda kept: len(kept.raw))
    free = "tensorstore_ck.engine.write.delta_bases.free_bytes"
    monkeypatch.setattr(free, lambda: int(block_bytes / KEPT_SHARE) - cache._kept_bytes)
    for step in range(3):
        faults.noted.clear()
        save(store, state, step)
        train(state, step)
    assert sum(what.startswith("read packs/") for what in faults.noted) >= 2
    (kept,) = store.engine.kept_blocks._kept.values()
    kept.raw[0] ^= 1
    save(store, state, 3)
    assert equal(store.checkout(REF), state)


def test_a_later_save_hashes_what_it_saves_and_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    state, store = first_state(), follower(MemoryBackend())
    sizes = [save(store, state, 0).new_bytes]
    for step in (1, 2):
        if step == 2:
            monkeypatch.setattr("tensorstore_ck.engine.write.delta_bases.block_id", lambda _: pytest.fail("a base is hashed"))
        train(state, step)
        sizes.append(save(store, state, step).new_bytes)
    assert sizes[2] < sizes[0] / 5
    monkeypatch.undo()
    assert equal(store.checkout(REF), state)


def test_a_base_that_was_stored_as_opaque_bytes(tmp_path: Path) -> None:
    tensor = torch.arange(20_000) // 100
    value = tensor.numpy().tobytes()
    with tsck.open(tmp_path / "store", create=True, delta=True, cache_dir=tmp_path / "cache") as store:
        for step in range(3):
            store.put_snapshot({"tensor": tensor, "value": value}, ref=REF, step=step)
            assert torch.equal(store.checkout(REF)["tensor"], tensor)
            tensor[step] += 1


def test_a_base_that_was_stored_as_opaque_bytes_is_the_block_before_again(tmp_path: Path) -> None:
    tensor = torch.arange(20_000) // 100
    value = tensor.numpy().tobytes()
    with tsck.open(tmp_path / "store", create=True, delta=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot({"value": value}, ref="first", step=0)
        for step, more in enumerate((0, 1, 0, 1, 0, 2)):
            store.put_snapshot({"tensor": tensor + more * (1 + tensor % 3)}, ref=REF, step=step)
            assert torch.equal(store.checkout(REF)["tensor"], tensor + more * (1 + tensor % 3))


def test_blocks_stay_in_memory_when_chains_of_differences_begin_again() -> None:
    """Each is kept once, and none is read again."""
    faults, state = NotedFaults(), first_state()
    store = follower(MemoryBackend(), faults)
    for step in range(30):
        save(store, state, step)
        if step == 1:
            faults.noted.clear()
        train(state, step, 0.05)
    assert not [what for what in faults.noted if what.startswith("read packs/")]
    kept = store.engine.kept_blocks._kept
    assert sum(len(block.raw) for block in kept.values()) <= store.log(REF)[0].logical_bytes


def test_a_save_that_fails_leaves_no_blocks_that_nobody_asks_for() -> None:
    faults, state = NotedFaults(), first_state()
    store = follower(MemoryBackend(), faults)
    for step in range(2):
        save(store, state, step)
        train(state, step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorstore_ck.engine.write.part_writer.store_part", _no_space)
        with pytest.raises(NoSpaceError):
            save(store, state, 2)
    assert not store.engine.kept_blocks._kept
    save(store, state, 2)
    assert equal(store.checkout(REF), state)


def _no_space(*_: object, **__: object) -> None:
    raise NoSpaceError("no space", object_id="part")


def open_views() -> list[LmdbView]:
    return [found for found in gc.get_objects() if type(found) is LmdbView]


def test_no_view_of_the_cache_stays_open_where_nobody_collects_garbage(tmp_path: Path) -> None:
    state = {"w": torch.zeros(50_000)}
    with tsck.open(tmp_path / "store", create=True, delta=True, cache_dir=tmp_path / "cache") as store:
        gc.collect()
        gc.disable()
        earlier = open_views()  # of other tests' stores
        try:
            for step in range(4):
                state["w"][step] += 1
                store.put_snapshot(state, ref=REF, step=step)
            views = [view for view in open_views() if view not in earlier]
        finally:
            gc.enable()
        assert views == []


@pytest.mark.parametrize("forged", ["another size", "fewer rows"])
def test_a_parent_that_does_not_fit_its_layout_is_no_base(tmp_path: Path, forged: str) -> None:
    """`a` is said to be a difference to `b`, which is twice as large; or the part has no blocks of tensors."""
    state = {"model": {"a": torch.zeros(1 << 17), "b": torch.zeros(1 << 18)}}
    with tsck.open(tmp_path / "store", create=True, delta=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot(state, ref=REF, step=0)
        for ulid, part in [*store.engine._parts.items()]:
            first = int(part.blobs["blocks"].sum())
            ids, extents = part.ids, np.concatenate((part.extents, part.extents[first + 1 : first + 2]))
            extents[["codec", "flags", "stored", "base"]][first] = (Codec.DELTA, 1, 100_000, len(extents) - 1)
            other = part._replace(extents=extents, base_ids=ids[32 * (first + 1) : 32 * (first + 2)])
            if forged == "fewer rows":
                other = part._replace(extents=part.extents[:first], ids=ids[: 32 * first])
            store.engine._parts[ulid] = other
        state["model"]["a"][7] += 1
        store.put_snapshot(state, ref=REF, step=1)
        assert equal(store.checkout(REF), state)
