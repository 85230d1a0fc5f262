"""What gc and recode do in a store of more packs than fit into memory, or than one host reads: budgets, and workers of a cluster."""

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.errors import NoSpaceError
from tensorstore_ck.format.pack import BASE_DTYPE, ENTRY_DTYPE, Footer
from tensorstore_ck.gc.collect import run_gc
from tensorstore_ck.gc.compact import SparsePack, live_bytes
from tensorstore_ck.gc.plan import SparsePacks
from tensorstore_ck.gc.recode import recode_snapshots
from tensorstore_ck.store import Store
from tests.gc.stores import AT_ONCE, open_store, put_all, require_sound, sizes, state, stay_in_one_thread

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Workers:
    """A cluster in this process: what it runs is drawn ahead, and done even if an earlier piece fails."""

    is_remote = True

    def __init__(self) -> None:
        self.pieces = 0

    def run(self, work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
        """See `Executor`."""
        for piece in pieces:
            self.pieces += 1
            yield pickle.loads(pickle.dumps(work(piece)))


class FullOnce(MemoryBackend):
    """Has no space for some of the new packs."""

    fails_at: int | None = None
    error: BaseException = NoSpaceError("no space left", object_id="packs")
    stays_full = False
    """Whether nothing fits from then on, as with a bucket's quota."""

    def _insert(self, name: str, data: Buffer) -> bool:
        if self.fails_at is not None and (name.startswith("packs/") or self.fails_at < 0):
            self.fails_at -= 1
            if self.fails_at == -1 or (self.fails_at < 0 and self.stays_full):
                raise self.error
        return super()._insert(name, data)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)
    monkeypatch.setattr("tensorstore_ck.gc.compact.PIECE_BYTES", 1)  # a pack in each piece


def three_sparse_packs(backend: MemoryBackend) -> Store:
    store = open_store(backend)
    for number, ref in enumerate("abc"):
        put_all(store, ref, [state(*range(10 * number, 10 * number + 4)), state(10 * number)])
        store.forget(f"{ref}@1")
    return store


def count_packs(backend: MemoryBackend) -> int:
    return sum(name.startswith("packs/") for name in sizes(backend))


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_piece_without_space_leaves_the_others_in_force(fails_at: int) -> None:
    backend = FullOnce()
    store = three_sparse_packs(backend)
    packs = count_packs(backend)
    backend.fails_at = fails_at
    report = run_gc(store.engine, AT_ONCE, executor=Workers())
    copied = fails_at  # no piece is begun after that
    assert len(report.rewritten) == copied
    left = f"{3 - copied} sparse packs were not rewritten: there is no space for copies of their live blocks"
    assert report.notes == (left,)
    assert count_packs(backend) == packs
    require_sound(store, {"a": state(0), "b": state(10), "c": state(20)})
    assert len(run_gc(store.engine, AT_ONCE, executor=Workers()).rewritten) == 3 - copied
    require_sound(store, {"a": state(0), "b": state(10), "c": state(20)})


def test_gc_ends_well_where_no_log_entry_fits_either() -> None:
    backend = FullOnce()
    backend.stays_full = True
    store = three_sparse_packs(backend)
    backend.fails_at = 1
    report = run_gc(store.engine, AT_ONCE, executor=Workers())
    assert report.rewritten == ()
    assert report.notes == ("3 sparse packs were not rewritten: there is no space for copies of their live blocks",)
    require_sound(store, {"a": state(0), "b": state(10), "c": state(20)})
    backend.fails_at = None
    assert len(run_gc(store.engine, AT_ONCE).rewritten) == 3
    require_sound(store, {"a": state(0), "b": state(10), "c": state(20)})


def compressible(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {"weights": (generator.standard_normal(50_000) * 0.02).astype(np.float32)}


@pytest.mark.parametrize(
    ("workers", "error"), [(Workers(), NoSpaceError("full")), (None, NoSpaceError("full")), (None, KeyboardInterrupt())]
)
def test_recode_keeps_what_was_copied_before_it_was_stopped(
    monkeypatch: pytest.MonkeyPatch, workers: Workers | None, error: BaseException
) -> None:
    monkeypatch.setattr("tensorstore_ck.gc.recode_or_move.COMPACT_BATCH_BYTES", 1)
    backend = FullOnce()
    store = open_store(backend)
    for seed, ref in enumerate("abc"):
        store.put_snapshot(compressible(seed), ref=ref, codec="raw")
    backend.fails_at, backend.error = 2, error
    with pytest.raises(type(error)):
        recode_snapshots(store.engine, [], codec="small", executor=workers)
    backend.fails_at = None
    assert len(store.recode(codec="small", dry_run=True).rewritten) == 1
    assert store.fsck(read_data=True).ok
    assert all(np.array_equal(store.checkout(ref)["weights"], compressible(seed)["weights"]) for seed, ref in enumerate("abc"))


def test_workers_look_at_the_packs_that_recode_may_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.gc.recode_or_move.LOOK_PACKS", 2)
    store = open_store(MemoryBackend())
    for seed, ref in enumerate("abc"):
        store.put_snapshot(compressible(seed), ref=ref, codec="raw")
    workers = Workers()
    planned = recode_snapshots(store.engine, [], codec="small", dry_run=True, executor=workers)
    assert (workers.pieces, planned) == (2, store.recode(codec="small", dry_run=True))


def test_the_budget_is_the_same_whatever_the_order_of_the_packs() -> None:
    """Packs beyond it are dropped as others come: compared with all packs, sorted at the end."""
    draw = random.Random(1)
    for _ in range(300):
        budget = draw.choice([0, 500, 3_000, 20_000])
        packs = []
        for number in range(draw.randrange(40)):
            entries = np.zeros(draw.randint(1, 4), ENTRY_DTYPE)
            entries["stored"] = [draw.randint(1, draw.choice([50, 1_000, 6_000])) for _ in entries]
            size_bytes = int(entries["stored"].sum()) + draw.randrange(5_000)
            packs.append(
                SparsePack(Ulid(number.to_bytes(16)), Footer(entries, np.zeros(0, BASE_DTYPE)), np.arange(len(entries)), size_bytes)
            )
        draw.shuffle(packs)
        found = SparsePacks(budget)
        for pack in packs:
            found.add(pack)
        ordered = sorted(packs, key=lambda pack: (live_bytes(pack) / pack.size_bytes, pack.pack))
        expected = [pack.pack for pack, end in zip(ordered, accumulate(map(live_bytes, ordered)), strict=True) if end <= budget]
        chosen, left = found.chosen()
        assert ([pack.pack for pack in chosen], left) == (expected, len(packs) - len(expected))
