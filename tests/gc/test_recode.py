"""Re-encoded cold snapshots: smaller, with the same roots, and all else unchanged."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.format.codec import Codec, Elements, Encoded, Encoder
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend
from tests.format.codec.training import put_steps, same
from tests.gc.stores import (
    AT_ONCE,
    Clock,
    State,
    contents,
    copied,
    each_call,
    interrupted,
    open_store,
    require_readable,
    require_sound,
    sizes,
)

DAY_SECONDS = 86_400


def weights(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(50_000, generator=generator) * 0.02
    return {"w": numbers, "half": (numbers * 3).bfloat16(), "n": torch.arange(9000) + seed, "text": f"value {seed} " * 9000}


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(torch.equal(left[key], right[key]) for key in ("w", "half", "n")) and left["text"] == right["text"]


def stored(store: tsck.Store) -> int:
    return store.usage().stored_bytes


def test_it_gets_smaller_and_stays_what_it_is() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    put = [(store.put_snapshot(weights(seed), ref="run", step=seed, codec="raw"), weights(seed)) for seed in range(3)]
    before, roots = stored(store), [snapshot.root for snapshot in store.log("run")]
    everything = contents(backend)
    planned = store.recode("run", dry_run=True)
    assert planned.dry_run
    assert contents(backend) == everything
    done = store.recode("run")
    assert {pack.name for pack in done.rewritten} == {pack.name for pack in planned.rewritten} != set()
    assert done.snapshots == 3
    assert done.after_bytes < 0.8 * done.before_bytes
    assert planned.after_bytes == pytest.approx(done.after_bytes, rel=0.1)
    assert stored(store) < 0.85 * before
    assert [snapshot.root for snapshot in store.log("run")] == roots
    store.gc(AT_ONCE)
    assert sum(sizes(backend).values()) < 0.85 * before
    for reader in (store, open_store(backend)):
        assert all(equal(reader.checkout(snapshot.root), state) for snapshot, state in put)
    assert store.fsck(read_data=True).ok
    again = store.recode("run")
    assert again.rewritten == ()
    assert again.kept > 0


def test_only_what_was_chosen() -> None:
    clock = Clock()
    store = open_store(clock=clock)
    for seed, ref in enumerate(("old", "other", "old")):
        store.put_snapshot(weights(seed), ref=ref, step=seed, codec="raw")
        clock.advance(DAY_SECONDS)

    def chosen(*addresses: str, **options: Any) -> set[str]:
        return {pack.name for pack in store.recode(*addresses, dry_run=True, **options).rewritten}

    first, second, third = chosen("old@0"), chosen("other"), chosen("old@2")
    assert len({frozenset(first), frozenset(second), frozenset(third)}) == 3
    assert chosen("old") == first | third
    assert chosen() == first | second | third
    assert chosen(older_than="36h") == first | second
    assert chosen("old", older_than=1.5 * DAY_SECONDS) == first
    assert chosen("old", older_than="30d") == set()
    store.recode("old@0")
    assert chosen("old@0") == set()
    assert chosen() == (second | third) - first


def test_differences_and_roundings_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied as they are, and what lies in the same packs in full becomes smaller."""
    encode = Encoder.encode_tensor

    def encode_every_other(encoder: Encoder, raw: Buffer, elements: Elements) -> Encoded:  # as earlier builds did by default
        return Encoded(Codec.RAW, (raw,)) if raw[0] & 1 else encode(encoder, raw, elements)

    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache", codec="fast", delta=True) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Encoder, "encode_tensor", encode_every_other)
            steps = put_steps(store, 3)
        before = {usage.codec: usage.raw_bytes for usage in store.usage().codecs}
        assert before.keys() == {"raw", "planes", "delta", "cast", "lz4"}
        done = store.recode("run@1", codec="fast")
        after = {usage.codec: usage.raw_bytes for usage in store.usage().codecs}
        assert done.rewritten
        assert done.notes == ()
        assert (after["delta"], after["cast"]) == (before["delta"], before["cast"])
        assert after["planes"] > before["planes"]
        store.gc(AT_ONCE)
        assert all(same(store.checkout(snapshot.root), state) for snapshot, state in steps)
        assert store.fsck(read_data=True).ok


def test_packs_that_hold_only_differences_are_left_alone(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache", codec="small") as store:
        put_steps(store, 3)
        assert store.recode(dry_run=True).rewritten == ()


@pytest.mark.slow
@pytest.mark.race
def test_another_host_at_any_call() -> None:
    template = MemoryBackend()
    store = open_store(template)
    roots = [store.put_snapshot(small(seed, seed + 1), ref="run", step=seed, codec="raw").root for seed in range(2)]

    def run(at: int, what: str) -> str:
        backend = copied(template)
        other = open_store(backend)

        def interfere() -> None:
            match what:
                case "gc":
                    other.gc(AT_ONCE)
                case "recode":
                    other.recode("run")
                case "forget":
                    other.forget("run@0")
                    other.gc(AT_ONCE)
                case _:
                    other.put_snapshot(small(1, 7), ref="run", step=2, expect=tsck.ANY)

        recoding, interrupt = interrupted(backend, at, interfere)
        recoding.recode("run")
        if interrupt.struck:
            open_store(backend).gc(AT_ONCE)
            require_sound(open_store(backend), {roots[seed]: small(seed, seed + 1) for seed in range(1 if what == "forget" else 0, 2)})
        return interrupt.struck

    assert {"list", "get", "put", "create"} <= each_call(run, ["gc", "recode", "forget", "put"])


@pytest.mark.slow
@pytest.mark.race
def test_it_may_die_anywhere() -> None:
    """What was replaced is needed until the log says otherwise; another run goes on."""
    template = MemoryBackend()
    held: dict[str, State] = {open_store(template).put_snapshot(small(0, 1), ref="run", codec="raw").root: small(0, 1)}

    def run(at: int, mode: str) -> str:
        backend = copied(template)
        dying = open_store(FaultyBackend(backend, faults := Faults(), atomic_put=True))
        faults.mode, faults.at = mode, faults.calls + at
        with contextlib.suppress(Death):
            dying.recode("run")
        if faults.struck:
            require_readable(open_store(backend), held)
            store = open_store(backend)
            store.recode("run")
            store.gc(AT_ONCE)
            require_sound(open_store(backend), held)
        return faults.struck

    assert {"list", "get", "put", "create"} <= each_call(run, ["die-before", "tear"])


def small(*seeds: int) -> State:
    return {f"w{seed}": torch.randn(5000, generator=torch.Generator().manual_seed(seed)) for seed in seeds}


@pytest.mark.parametrize("codec", ["raw", "auto", "best", None])
def test_codecs_that_make_nothing_smaller_are_refused(codec: Any) -> None:
    with pytest.raises(InvalidOptionError, match="must be 'fast' or 'small'"):
        open_store().recode(codec=codec)


def test_unknown_addresses_are_refused() -> None:
    with pytest.raises(NotFoundError):
        open_store().recode("nope")


def test_damaged_packs_are_left_and_reported() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    store.put_snapshot(weights(0), ref="run", codec="raw")
    [pack] = [name for name in sizes(backend) if name.startswith("packs/")]
    data = bytearray(backend.get(pack, max_bytes=1 << 30))
    data[200] ^= 1
    backend.delete([pack])
    backend.put(pack, bytes(data))
    report = store.recode("run")
    assert report.rewritten == ()
    assert pack in report.notes[0]


def test_a_pack_that_another_one_has_replaced_is_left_and_reported() -> None:
    """It is sound by itself, and has fewer blocks than snapshots need of it."""
    backend = MemoryBackend()
    store = open_store(backend)
    store.put_snapshot(weights(0), ref="run", codec="raw")
    [pack] = [name for name in sizes(backend) if name.startswith("packs/")]
    store.put_snapshot(small(1), ref="other")
    [other] = [name for name in sizes(backend) if name.startswith("packs/") and name != pack]
    data = backend.get(other, max_bytes=1 << 30)
    backend.delete([pack])
    backend.put(pack, data)
    report = store.recode("run")
    assert report.rewritten == ()
    assert pack in report.notes[0]
