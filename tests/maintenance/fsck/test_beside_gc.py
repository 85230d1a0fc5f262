"""fsck while others write, forget, free and rewrite: at each of its backend calls. What it finds then is never an error."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.gc.compact import SparsePack, compact
from tensorstore_ck.log import ObjectKey, Objects, Op
from tensorstore_ck.maintenance.fsck import run_fsck
from tensorstore_ck.maintenance.fsck.findings import Finding
from tests.gc.relocated import copy_pack, footer_of, packs_of
from tests.gc.stores import AT_ONCE, Interrupted, interrupted
from tests.maintenance.fsck.stores import backend_of, begun, contents, flip, names, read, reopen


def objects() -> dict[str, bytes]:
    """Snapshots that share tensors, so that forgetting the first one leaves its pack sparse."""
    backend, store = begun()
    for step in range(3):
        state = {"kept": torch.arange(3000.0), "own": torch.full((9000,), float(step)), "step": step}
        store.put_snapshot(state, ref="runs/a", step=step, codec="raw")
    return contents(backend)


OBJECTS = objects()


def free(backend: Backend) -> None:
    """Forgets the first snapshot, frees it, and rewrites its pack."""
    store = reopen(backend)
    store.forget("runs/a@0")
    report = store.gc(AT_ONCE)
    assert report.deleted["snapshot"] == 1
    assert report.rewritten
    store.gc(AT_ONCE)


def forget_branch(backend: Backend) -> None:
    store = reopen(backend)
    store.forget("runs/a")
    assert store.gc(AT_ONCE).deleted["pack"] == 3


def put(backend: Backend) -> None:
    store = reopen(backend)
    store.checkout("runs/a")
    store.put_snapshot({"kept": torch.arange(3000.0), "new": torch.ones(5000)}, ref="runs/a", step=9)


def check(when: int | str, backend: Backend, meanwhile: Callable[[Backend], object]) -> tuple[list[Finding], Interrupted]:
    """The errors that a host without a cache finds, at one call of which `meanwhile` happens."""
    store, interruption = interrupted(backend, when, lambda: meanwhile(backend))
    report = run_fsck(store.engine, read_data=True)
    return [finding for finding in report.findings if finding.severity == "error"], interruption


@pytest.mark.race
@pytest.mark.parametrize("meanwhile", [free, forget_branch, put])
def test_at_every_call(meanwhile: Callable[[Backend], None]) -> None:
    _, quiet = check(0, backend_of(OBJECTS), meanwhile)
    for at in range(2, quiet.calls):
        errors, interruption = check(at, backend_of(OBJECTS), meanwhile)
        assert interruption.struck
        assert errors == [], (at, interruption.struck)


def test_fsck_finds_missing_needed_objects_while_gc_runs() -> None:
    backend = backend_of(OBJECTS)
    lost = names(backend, "packs/")[-1]

    def happens(backend: Backend) -> None:
        put(backend)
        backend.delete([lost])

    errors, _ = check(4, backend, happens)
    assert [finding.object for finding in errors] == [lost]


def test_relocated_and_freed_objects_are_no_damage_but_a_damaged_moved_object_is() -> None:
    backend = backend_of(OBJECTS)
    free(backend)
    (moved,) = names(backend, "moved/")
    assert check(0, backend, free)[0] == []
    flip(backend, moved)
    ((finding,), _) = check(0, backend, free)
    assert finding.object == moved
    assert "runs/a@1" in finding.hits[0]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_pack_that_was_listed_while_it_was_written_and_is_in_use_since_is_read_again(*, is_damaged: bool) -> None:
    """Another process moves both packs of a snapshot: the first before packs are listed, the other to a pack that is half written then."""
    backend, store = begun()
    weight = torch.randn(50_000, generator=torch.Generator().manual_seed(1))
    store.put_snapshot({"weight": weight}, ref="runs/a", step=1)
    weight[3] = 1
    store.put_snapshot({"weight": weight}, ref="runs/a", step=2, delta=True)
    engine = store.engine
    first, last = packs_of(engine)[0], packs_of(engine)[-1]
    footer = footer_of(engine, last)
    (move,) = compact(engine, [SparsePack(last, footer, np.arange(len(footer.entries)), backend.size(pack_name(last)))]).moves
    copy = pack_name(move.targets[0])
    whole = bytearray(read(backend, copy))
    block = footer_of(engine, move.targets[0]).entries[0]
    whole[int(block["offset"]) + int(block["stored"]) // 2] ^= 255 * is_damaged
    backend.replace(copy, bytes(whole[:-9]))

    def free_first() -> None:
        copy_pack(engine, first)
        engine.log.append(lambda _: [Op.sweep(Objects([ObjectKey("pack", first)]))])
        backend.delete([pack_name(first)])
        faults.struck, faults.when, faults.action = "", f"read {pack_name(last)}", free_last

    def free_last() -> None:
        backend.replace(copy, bytes(whole))
        gone = Objects([ObjectKey("pack", last)])
        engine.log.append(lambda _: [Op.relocate(last, move.ulid, move.hash, move.targets), Op.condemn(gone)])
        engine.log.append(lambda _: [Op.sweep(gone)])
        backend.delete([pack_name(last)])

    other, faults = interrupted(backend, "list packs", free_first)
    if is_damaged:
        assert {finding.object for finding in other.fsck(read_data=True).findings} == {copy}
        return
    report = other.repair(read_data=True)
    assert (report.before.ok, report.marked, report.ok) == (True, (), True)
    assert torch.equal(reopen(backend).checkout("runs/a")["weight"], weight)
