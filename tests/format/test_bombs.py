"""Snapshots of a few KB that were made to take gigabytes, or minutes: refused by what they ask for, not by what they take."""

import contextlib
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common import host_memory
from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.engine.read.block_reader import decode_at
from tensorstore_ck.format import part as part_module
from tensorstore_ck.format import sealed, tree
from tensorstore_ck.format.codec import Codec
from tensorstore_ck.format.sealed import FREE_BYTES, ParseBudget
from tensorstore_ck.log.block_index import Base, Location
from tensorstore_ck.store import Store
from tests.format import samples
from tests.format.forged import Forged, layout_of, publish
from tests.gc.stores import open_store

MIB = 1 << 20
PEAK_BYTES = 48 * MIB
PRIME = (1 << 61) - 1
"""Python's hash of an int is its rest by this."""

Look = Callable[[Store], object]


def show(store: Store) -> object:
    return store.show("bomb")


def check_out(store: Store) -> object:
    return store.checkout("bomb")


def refused(look: Look, store: Store, error: type[tsck.StoreError] = tsck.CorruptObjectError) -> str:
    """What the error says; nothing large was allocated before it."""
    tracemalloc.start()
    try:
        with pytest.raises(error) as found:
            look(store)
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()
    assert found.value.object_id
    return str(found.value)


def big(value: int) -> list[Any]:
    return ["i", value.to_bytes(32, "little", signed=True)]


@pytest.mark.parametrize(
    ("look", "layout"),
    [
        (show, layout_of(["l", [None] * 800_000])),
        (check_out, layout_of(["d", ["k" * 900], [["l", [["l", []]] * 200_000]]])),
        (show, layout_of(None, unknown=[[]] * 800_000)),
    ],
    ids=["leaves", "containers with a long name", "an unknown key"],
)
def test_a_layout_that_expands(look: Look, layout: bytes) -> None:
    store = open_store()
    assert publish(store, Forged(layout, [None])) < 4000
    said = refused(look, store)
    assert "the layout of parts/" in said
    assert "bytes of memory to parse" in said


def test_one_budget_for_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would do."""
    monkeypatch.setattr(ParseBudget.__init__, "__defaults__", (FREE_BYTES // 4,))
    store = open_store()
    layout = layout_of(["l", [["l", []]] * 10_000])
    parts = [Forged(layout, rank=rank, more={"layout_of": b""} if rank < 2 else {}) for rank in range(4)]
    publish(store, *parts, ranks=2)
    with pytest.raises(tsck.CorruptObjectError, match="bytes of memory to parse"):
        store.show("bomb")
    assert store.checkout("bomb") == [[]] * 10_000


def test_large_values_that_expand() -> None:
    """Some are compressed better than a block of 4 MiB can be; others share a blob, which is decoded once."""
    compressed = Forged(layout_of(["l", [None] * 8]), [["b", "bytes", 0]] * 8, [[bytes(64 * MIB)]] * 8)
    shared = Forged(layout_of(["l", [None] * 300]), [["b", "li", 0]] * 300, [[bytes(4 * MIB)]])
    for forged, look, said in (
        (compressed, show, "of a large value is too large"),
        (compressed, check_out, "of a large value is too large"),
        (shared, show, "several values in one blob"),
        (shared, check_out, "several values in one blob"),
    ):
        store = open_store()
        assert publish(store, forged) < 4000
        assert said in refused(look, store)


def test_large_values_that_are_parsed() -> None:
    store = open_store()
    publish(store, Forged(layout_of(None), [["b", "m", 0]], [[b"\x92\xa1u\xdd" + (500_000).to_bytes(4, "big") + b"\xc0" * 500_000]]))
    assert "large value 0 of parts/" in refused(check_out, store)


def test_a_long_key_is_not_copied_to_each_container() -> None:
    store = open_store()
    publish(store, Forged(layout_of(["d", ["k" * 100_000], [["l", [["l", []]] * 5000]]])))
    tracemalloc.start()
    details = store.show("bomb")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not details.values
    assert peak < PEAK_BYTES


def test_many_values_below_a_long_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a name of its own, in memory: in an import, a save and a read."""
    store, state = open_store(), {"k" * 300: {"m" * 300: [None] * 100}, "short": [None] * 1000}
    store.put_snapshot(state, ref="a")
    monkeypatch.setattr(tree, "MAX_LONG_PATHS_BYTES", 20_000)
    with pytest.raises(tsck.UnsupportedValueError, match=r"too many values lie below paths.*use shorter keys"):
        store.put_snapshot(state, ref="a", expect=tsck.ANY)
    assert "too many values lie below paths" in refused(lambda store: store.show("a"), store)


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"none": [None] * 50_000}, marks=pytest.mark.slow),
        pytest.param({"tuples": [((None,),)] * 16_000}, marks=pytest.mark.slow),
        pytest.param({"dicts": [{"id": None, "done": False} for _ in range(8000)]}, marks=pytest.mark.slow),
        pytest.param({"empty": [[] for _ in range(20_000)]}, marks=pytest.mark.slow),
        {"zeros": bytes(40 * MIB), "text": "x" * (20 * MIB), "ints": [0] * MIB},
        {"set": set(range(100_000)), "keys": {(-1 - number % 2, number // 2, -1): number for number in range(5000)}},
        {f"layers.{layer}.experts.{expert}.{name}": torch.empty(0) for layer in range(30) for expert in range(30) for name in "abc"},
    ],
    ids=lambda state: next(iter(state))[:6],
)
def test_true_states_that_compress_well(state: dict[str, Any]) -> None:
    store = open_store()
    store.put_snapshot(state, ref="true", codec="small")
    found = store.checkout("true")
    assert found.keys() == state.keys()
    assert all(found[key] == value for key, value in state.items() if not isinstance(value, torch.Tensor))
    store.show("true")


def test_a_save_refuses_what_a_reader_would_refuse() -> None:
    store = open_store()
    with pytest.raises(tsck.UnsupportedValueError, match="too many empty containers"):
        store.put_snapshot({"a": [[] for _ in range(60_000)]}, ref="a")
    with pytest.raises(tsck.NotFoundError):
        store.resolve("a")


def zeros_of(rows: int) -> Forged:
    """A tensor of so many blocks of 4 MiB, all of them one."""
    return Forged(layout_of(["d", ["w"], [0]], [("w", (rows, MIB))]), tensors=[bytes(4 * MIB)] * rows)


def test_tensors_that_fit_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The declared size is known beforehand: `show` prints it, and a checkout does not begin."""
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 200 * MIB)
    store = open_store()
    publish(store, zeros_of(64))
    assert store.show("bomb").tensors == (("w", "float32", (64, MIB), 256 * MIB),)
    choices: tuple[object, ...] = (None, {})
    for into in choices:
        with pytest.raises(tsck.NoSpaceError, match=r"\(268,435,456 bytes\) of memory.*\(209,715,200 bytes\) free.*select=.*into="):
            store.checkout("bomb", into=into)
    with store.open_snapshot("bomb") as opened:
        assert not opened["w"][63].any()


def test_tensors_that_are_one_block() -> None:
    store = open_store()
    assert publish(store, zeros_of(20)) < 5000
    assert store.checkout("bomb")["w"].shape == (20, MIB)


def test_a_block_of_many_large_bases() -> None:
    """What they decode to is known before any is read."""
    pack = Ulid(bytes(16))
    base = Base(Digest(bytes(32)), Location(pack, 1, 64, 100, 64 * MIB, Codec.ZSTD))
    block = Location(pack, 0, 164, 8, 4096, Codec.CAST, (base,) * 64, 64)
    with pytest.raises(tsck.CorruptObjectError, match="is said to need 4,294,967,296 bytes"):
        decode_at(MemoryBackend(), block)


ALIKE: dict[str, list[Any]] = {
    "ints": [big(PRIME * number) for number in range(1, 900)],
    "complex": [["j", -1000003.0 * number, float(number)] for number in range(900)],
    "tuples": [["u", [["u", [big(PRIME * number)]]]] for number in range(1, 900)],
    "sets": [["z", [big(PRIME * number)]] for number in range(1, 900)],
}


@pytest.mark.parametrize(("kind", "where"), list(zip(ALIKE, ["dict", "set", "set", "dict"], strict=True)))
def test_keys_that_were_chosen_to_collide(kind: str, where: str) -> None:
    keys = ALIKE[kind]
    store = open_store()
    if where == "dict":
        publish(store, Forged(layout_of(["d", keys, [None] * len(keys)]), [None] * len(keys)))
    else:
        publish(store, Forged(layout_of(None), [["e", keys]]))
    assert "same hash" in refused(check_out, store)
    store.show("bomb")


def test_what_a_small_size_alone_admits_the_budget_admits() -> None:
    """Random bodies of almost nothing but items, around the size from which they are walked: refused if a walk refuses them."""
    choose, part = random.Random(1), samples.part()
    refusals = 0
    for _ in range(300):
        ranks = choose.choice([1, 8, 300, 5000])
        items = int(FREE_BYTES // (2 * ranks) / 257 * choose.uniform(0.5, 20))
        body = b"\xdd" + items.to_bytes(4, "big") + b"\xc0" * items
        budget = ParseBudget(FREE_BYTES // (2 * ranks))
        budget.add_stored(int(part.extents["stored"][:2].sum()) // 4 + part.stored_bytes + 48 * ranks)
        try:
            sealed.check_msgpack(memoryview(body), "it", budget)
            is_refused = False
        except tsck.CorruptObjectError:
            is_refused = True
        refusals += is_refused
        with pytest.raises(tsck.UnsupportedValueError) if is_refused else contextlib.nullcontext():
            part_module.require_readable(part, bytes(8) + body + bytes(32), [], ranks=ranks, ranks_of_layout=ranks)
    assert 0 < refusals < 300
