"""put_snapshot and checkout through the public surface: what is written once, what is noticed, what is refused."""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.cli import main
from tensorstore_ck.common.ids import new_ulid
from tensorstore_ck.engine.write.pack_writer import PackWriter
from tensorstore_ck.format.store_config import decode_config

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def url(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(url: Path, tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(url, create=True, cache_dir=tmp_path / "cache") as store:
        yield store


def tensors(seed: int, count: int = 4, rows: int = 300) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{number}": torch.randn(rows, 100, generator=generator) for number in range(count)}


def equal(left: Tensors, right: Tensors) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def packs(url: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (url / "packs").rglob("*") if path.is_file()}


def test_unchanged_tensors_are_stored_once(store: tsck.Store, url: Path) -> None:
    state = tensors(0)
    first = store.put_snapshot(state, ref="job", step=1, codec="raw")
    before = packs(url)
    state["layer.2"] = state["layer.2"] + 1
    second = store.put_snapshot(state, ref="job", step=2, codec="raw")
    added = {name: size for name, size in packs(url).items() if name not in before}
    assert first.new_bytes > 4 * 120_000
    assert 120_000 < sum(added.values()) < 122_000
    assert second.new_bytes < 125_000
    assert equal(store.checkout("job"), state)
    assert equal(store.checkout("job@1"), tensors(0))
    third = store.put_snapshot(state, ref="job", step=3, codec="raw")
    assert len(packs(url)) == 2
    assert third.new_bytes < 5000


def test_another_ref_shares_blocks_through_the_index(store: tsck.Store, url: Path, tmp_path: Path) -> None:
    store.put_snapshot(tensors(0), ref="one")
    other = store.put_snapshot(tensors(0), ref="two")
    assert other.parent is None
    assert len(packs(url)) == 1
    with tsck.open(url, cache_dir=tmp_path / "no-index") as cold:
        cold.put_snapshot(tensors(0), ref="three")
        assert equal(cold.checkout("three"), tensors(0))
    assert len(packs(url)) == 2, "a cold host cannot know, and must not need to"


def test_repeated_blocks_within_a_save(store: tsck.Store, url: Path) -> None:
    state = {f"zero.{number}": torch.zeros(3 << 20, dtype=torch.uint8) for number in range(8)}
    store.put_snapshot(state, ref="job")
    assert sum(packs(url).values()) < (3 << 20) + 5000
    assert equal(store.checkout("job"), state)


def test_root_is_the_same_everywhere(url: Path, tmp_path: Path) -> None:
    roots = set()
    for name in ("a", "b"):
        with tsck.open(tmp_path / name, create=True, cache_dir=tmp_path / "cache") as one:
            roots.add(one.put_snapshot(tensors(7), ref=name, step=5, metadata={"lr": 0.1}, metrics={"loss": ord(name)}).root)
    assert len(roots) == 1


def test_lost_pack_is_written_again(store: tsck.Store, url: Path) -> None:
    store.put_snapshot(tensors(0), ref="job", step=1)
    for path in (url / "packs").rglob("*"):
        if path.is_file():
            path.unlink()
    store.put_snapshot(tensors(0), ref="job", step=2)
    assert equal(store.checkout("job"), tensors(0))
    with pytest.raises(tsck.MissingObjectError):
        store.checkout("job@1")


def test_damaged_parent_costs_dedup_only(store: tsck.Store, url: Path, tmp_path: Path) -> None:
    store.put_snapshot(tensors(0), ref="job", step=1)
    (part,) = (path for path in (url / "parts").rglob("*") if path.is_file())
    part.write_bytes(part.read_bytes()[:-1])
    with tsck.open(url, cache_dir=tmp_path / "cold") as fresh:
        with pytest.warns(UserWarning, match="cannot reuse the blocks of the parent"):
            fresh.put_snapshot(tensors(0), ref="job", step=2, expect=tsck.ANY)
        assert equal(fresh.checkout("job"), tensors(0))


def test_one_bad_read_is_no_damage(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    state, left = tensors(0), [1]
    store.put_snapshot(state, ref="job")

    def read_into(self: LocalBackend, name: str, offset: int, memory: memoryview, original: Any = LocalBackend.read_into) -> None:
        original(self, name, offset, memory)
        if left and name.startswith("packs/") and len(memory) > 10_000:
            memory[left.pop()] ^= 4

    monkeypatch.setattr(LocalBackend, "read_into", read_into)
    assert equal(store.checkout("job"), state)
    assert left == []


def test_large_states_span_packs(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path / "packs-only"))
    writer = PackWriter(backend, new_ulid, lambda _: {}, open_packs=2, limit_bytes=1 << 20)
    blocks = [bytes([number]) * 300_000 for number in range(20)]
    ids = [writer.add([block])[0] for block in blocks]
    writer.close()
    places = [writer.location(block) for block in ids]
    assert len({place.pack for place in places}) == 5
    for block, place in zip(blocks, places, strict=True):
        read = bytearray(place.raw)
        text = next(info.name for info in backend.list("packs/") if backend.size(info.name) and _ulid(info.name) == place.pack)
        backend.read_into(text, place.offset, memoryview(read))
        assert bytes(read) == block


def _ulid(name: str) -> bytes | None:
    from tensorstore_ck.common.ids import parse_ulid

    return parse_ulid(name.rpartition("/")[2])


def test_many_small_tensors_of_many_shapes(store: tsck.Store) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {f"p{number}": torch.randn(1 + number * 7 % 5000, generator=generator) for number in range(500)}
    store.put_snapshot(state, ref="job")
    assert equal(store.checkout("job"), state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    pointers = [tensor.data_ptr() for tensor in target.values()]
    assert equal(store.checkout("job", into=target), state)
    assert equal(target, state)
    assert pointers == [tensor.data_ptr() for tensor in target.values()]


def test_long_rows_and_many_blocks(store: tsck.Store) -> None:
    state = {"wide": torch.randn(3, 2 << 20), "tall": torch.randn(5 << 20), "cube": torch.randn(2, 3, 1 << 20)}
    store.put_snapshot(state, ref="job")
    assert equal(store.checkout("job"), state)
    with store.open_snapshot("job") as lazy:
        assert torch.equal(lazy["wide"][1:2, 5:9], state["wide"][1:2, 5:9])
        assert torch.equal(lazy["tall"][-5:], state["tall"][-5:])


def test_too_many_small_tensors_are_refused_before_anything_is_written(
    store: tsck.Store, url: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorstore_ck.engine.write.write_plan.MAX_BODY_BYTES", 1 << 20)
    state = {"large": torch.ones(1 << 20), **{f"small.{number}": torch.zeros(1024) for number in range(257)}}
    with pytest.raises(tsck.InputError, match=r"the 257 tensors of up to 4,096 bytes have 1\.0 MiB together.*: stack them"):
        store.put_snapshot(state, ref="job")
    assert packs(url) == {}


def test_addresses(store: tsck.Store) -> None:
    one = store.put_snapshot(tensors(1), ref="job", step=1)
    two = store.put_snapshot(tensors(2), ref="job", step=1)
    store.tag("first", one.root)
    assert store.resolve("job@1").root == two.root
    assert store.resolve("job~1").root == store.resolve("first").root == store.resolve(one.root[:8]).root == one.root
    assert store.resolve(f"{two.root}~1").root == one.root


@pytest.mark.parametrize(
    "options",
    [
        {"step": -1},
        {"step": 1.5},
        {"step": True},
        {"step": torch.tensor(3.0)},
        {"step": 1 << 64},
        {"metrics": {"loss": "low"}},
        {"metrics": {3: 1.0}},
        {"metrics": [1.0]},
        {"metadata": 3},
        {"frozen": 3},
        {"metadata": {"model": object()}},
        {"metadata": {1: 2}},
        {"metadata": {"big": "x" * (2 << 20)}},
        {"expect": 7},
    ],
)
def test_bad_options_write_nothing(store: tsck.Store, url: Path, options: dict[str, object]) -> None:
    with pytest.raises(tsck.InputError):
        store.put_snapshot(tensors(0), ref="job", **options)  # type: ignore[arg-type]
    assert packs(url) == {}
    assert not store.branches()


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.log(3),
        lambda store: store.bisect(None, lambda _: False, good="b", bad="b"),
        lambda store: store.explain_retention(3),
        lambda store: store.untag(3),
        lambda store: store.undo(3),
        lambda store: store.log(limit=1.5),
    ],
)
def test_what_is_no_name_and_no_number_is_refused_by_name(store: tsck.Store, call: Callable[[Any], object]) -> None:
    store.put_snapshot(tensors(0), ref="b", step=1)
    with pytest.raises(tsck.InputError, match=r"^(3|None) (is not|cannot be)|not 1\.5"):
        call(store)


def test_put_to_a_tag(store: tsck.Store) -> None:
    store.put_snapshot(tensors(0), ref="job")
    store.tag("v1", "job")
    with pytest.raises(tsck.InputError, match="tags never move"):
        store.put_snapshot(tensors(0), ref="v1", expect=tsck.ANY)


def test_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(tsck.NotAStoreError, match="create=True"):
        tsck.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("inside", ["", "/store"])
@pytest.mark.parametrize("options", [{}, {"create": True}, {"read_only": True}])
def test_a_checkpoint_in_a_file_is_imported(tmp_path: Path, options: Any, inside: str, store: tsck.Store) -> None:
    torch.save({"w": torch.ones(3)}, file := tmp_path / "o.pt")
    with pytest.raises(tsck.NotAStoreError, match=f"{file} is a file, .*: `tsck import {file} -s STORE --ref REF`") as caught:
        tsck.open(f"{file}{inside}", **options)
    assert "create" not in str(caught.value)
    printed = re.findall(r"`tsck (import .*?)`", str(caught.value))[0]
    assert CliRunner().invoke(main, shlex.split(printed.replace("STORE", store.url).replace("REF", "runs/old"))).exit_code == 0
    assert torch.equal(store.checkout("runs/old")["w"], torch.ones(3))


def test_newer_format_is_refused(store: tsck.Store, url: Path, tmp_path: Path) -> None:
    config = decode_config((url / "store.json").read_bytes(), "here")
    (url / "store.json").write_bytes(replace(config, format=2).encode())
    with pytest.raises(tsck.FormatVersionError, match="upgrade"):
        tsck.open(url, cache_dir=tmp_path / "cache")


def test_a_snapshot_in_one_line(store: tsck.Store) -> None:
    store.put_snapshot(tensors(0), ref="job", step=1)
    snapshot = replace(store.mark("job@1", "bad", reason="loss"), time_ns=1_700_000_000_123_456_789)
    assert snapshot.time == datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)
    assert repr(snapshot) == f"Snapshot({snapshot.root[:12]}, job, step 1, 2023-11-14 22:13:20 UTC, bad)"
    assert store.resolve(snapshot.root[:12]).id == snapshot.id
    assert repr(replace(snapshot, step=None, mark="")) == f"Snapshot({snapshot.root[:12]}, job, 2023-11-14 22:13:20 UTC)"


def test_a_store_that_is_made_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with tsck.open(tmp_path / "a mistyped name", create=True):
            pass
    assert [record.message for record in caplog.records] == [f"made a new store at {tmp_path / 'a mistyped name'}"]


def test_a_new_store_where_this_user_has_seen_another_names_that_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tsck.open(tmp_path / "mounted", create=True, state_dir=tmp_path / "state") as store:
        store.put_snapshot(tensors(0), ref="job")
    kept = decode_config((tmp_path / "mounted" / "store.json").read_bytes(), "here").uuid
    (tmp_path / "mounted").rename(tmp_path / "elsewhere")
    seen = f"; this user has seen the store {kept} there: if nobody deleted or moved that one, its disk may not be mounted now"
    with pytest.raises(tsck.NotAStoreError, match=seen):
        tsck.open(tmp_path / "mounted", state_dir=tmp_path / "state")
    with tsck.open(tmp_path / "mounted", create=True, state_dir=tmp_path / "state"):
        pass
    made = f"made a new store at {tmp_path / 'mounted'}"
    assert [record.message for record in caplog.records] == [made, f"{made}{seen}"]
