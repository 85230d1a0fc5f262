"""Codecs from the outside: what is saved comes back, costs less, and outlives gc, compaction, damage and copies."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import tensorstore_ck as tsck
from tensorstore_ck.cli import main
from tensorstore_ck.common.ids import Ulid, parse_ulid
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.engine import reachability
from tensorstore_ck.engine.read import block_reader
from tensorstore_ck.engine.write import part_writer
from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError
from tensorstore_ck.format.codec import CODECS_WITH_BASES
from tensorstore_ck.gc.compact import read_footer
from tests.effort import PATIENCE_SECONDS
from tests.format.codec.training import SIZE, Training, put_steps, same

Open = Callable[..., tsck.Store]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    def begin(name: str = "store", **options: Any) -> tsck.Store:
        found: dict[str, Any] = {"create": True, "cache_dir": tmp_path / f"cache-{name}"}
        store: tsck.Store = tsck.open(tmp_path / name, **(found | options))
        return store

    return begin


def share(snapshot: tsck.Snapshot) -> float:
    return snapshot.new_bytes / snapshot.logical_bytes


def test_what_is_saved_comes_back_with_the_same_root_and_costs_less_with_each_mode(opened: Open) -> None:
    modes: dict[str, tuple[dict[str, Any], int]] = {
        "raw": ({"codec": "raw"}, 3),
        "fast": ({"codec": "fast"}, 3),
        "fast, with differences": ({"codec": "fast", "delta": True}, 3),
        "small": ({"codec": "small"}, 10),  # a block comes in full again
        "small, without differences": ({"codec": "small", "delta": False}, 3),
    }
    costs, roots = dict[str, list[float]](), list[list[str]]()
    for name, (options, steps) in modes.items():
        with opened(name, **options) as store:
            saves = put_steps(store, steps)
            assert all(same(store.checkout(snapshot.root), state) for snapshot, state in saves)
            assert store.fsck(read_data=True).ok
        costs[name] = [share(snapshot) for snapshot, _ in saves]
        roots.append([snapshot.root for snapshot, _ in saves[:3]])
    assert costs["raw"][0] > 0.99
    assert costs["fast"][0] < 0.66  # weights are roundings, masters 0.83
    assert costs["small"][0] < 0.66
    assert costs["small"][1] < 0.5 < costs["fast"][1]
    assert costs["fast, with differences"][1] < 0.5 < min(costs["small, without differences"])
    assert all(each == roots[0] for each in roots)


def test_a_codec_for_a_ref_and_for_a_save_and_unknown_ones_are_refused(opened: Open) -> None:
    wrong: list[dict[str, Any]] = [{"codec": "zip"}, {"codec": {"a": "tiny"}}, {"delta": -1}, {"delta": "yes"}, {"delta": 0.5}]
    for options in wrong:
        with pytest.raises(InvalidOptionError, match=r"codec must be one of|delta must be"):
            opened(**options)
    with opened(codec={"cold/*": "small", "*": "raw"}) as store:
        for name in ("codec", "delta"):
            unknown: dict[str, Any] = {name: "nothing"}
            with pytest.raises(InvalidOptionError):
                store.put_snapshot({}, ref="run", **unknown)
        assert share(store.put_snapshot({"w": torch.zeros(SIZE)}, ref="hot")) > 0.99
        assert share(store.put_snapshot({"w": torch.ones(SIZE)}, ref="cold/a")) < 0.01
        assert share(store.put_snapshot({"w": torch.full((SIZE,), 2.0)}, ref="warm", codec="fast")) < 0.01
        assert torch.equal(store.checkout("hot")["w"], torch.zeros(SIZE))


def test_a_block_in_full_comes_every_so_often(opened: Open) -> None:
    with opened(codec="small", delta=3) as store:
        steps = put_steps(store, 8)
        costs = [share(snapshot) for snapshot, _ in steps]
        assert [cost > 0.4 for cost in costs] == [True, False, False, True, False, False, True, False]
        assert all(same(store.checkout(snapshot.root), state) for snapshot, state in steps)


def test_what_differences_need_outlives_what_they_are_taken_from(opened: Open, tmp_path: Path) -> None:
    with opened(codec="small") as store:
        steps = put_steps(store, 4)
        last, state = steps[-1]
        before = sum(each.stat().st_size for each in tmp_path.glob("store/packs/*/*"))
        tsck_cli(tmp_path, "forget", *(f"run@{snapshot.step}" for snapshot, _ in steps[:-1]))
        for _ in range(2):  # what the first one compacts, the second one frees
            tsck_cli(tmp_path, "gc", "--min-age", "0s", "--undo-window", "0s", "--max-delete", "100%", "--compact-below", "100%")
        assert sum(each.stat().st_size for each in tmp_path.glob("store/packs/*/*")) < 0.7 * before
        for pack in tmp_path.glob("store/packs/*/*"):
            footer = read_footer(store.engine.backend, parse_ulid(pack.name) or Ulid(b""), pack.stat().st_size)
            for entry, codec in enumerate(footer.entries["codec"].tolist()):
                assert bool(footer.bases_of(entry)) == (codec in CODECS_WITH_BASES)
        assert same(store.checkout(last.root), state)
        assert store.fsck(read_data=True).ok
        assert same(opened(cache_dir=tmp_path / "new").checkout("run"), state)


def tsck_cli(folder: Path, *arguments: str) -> None:
    result = CliRunner().invoke(main, [*arguments, "-s", str(folder / "store"), "--cache-dir", str(folder / "cache-cli")])
    assert result.exit_code == 0, result.output


def test_a_copy_stands_for_itself_and_show_prints_the_size_of_each_group(opened: Open, tmp_path: Path) -> None:
    with opened(codec="small") as store, opened("other") as other:
        steps = put_steps(store, 2)
        groups = {group.name: group for group in store.show("run").groups}
        assert groups["weights"].codecs == {"cast": 3 * 2 * SIZE}
        assert groups["masters"].codecs == {"delta": 3 * 4 * SIZE}
        assert groups["weights"].stored_bytes < 100 < groups["masters"].stored_bytes < 0.7 * groups["masters"].raw_bytes
        tsck.copy(store, other, refs="run")
        assert [snapshot.root for snapshot in other.log("run")] == [snapshot.root for snapshot in store.log("run")]
        assert all(same(other.checkout(snapshot.root), state) for snapshot, state in steps)
        assert other.fsck(read_data=True).ok
    result = CliRunner().invoke(main, ["show", "run", "-s", str(tmp_path / "store"), "--cache-dir", str(tmp_path / "cache-cli")])
    assert "cast 100%" in result.stdout


def test_a_damaged_base_is_reported_and_not_used(opened: Open, tmp_path: Path) -> None:
    training = Training()
    with opened(codec="small") as store:
        for _ in range(2):
            store.put_snapshot(training.train(), ref="run", step=training.step)
    masters, differences = sorted(tmp_path.glob("store/packs/*/*"), key=lambda pack: pack.name)
    flip_byte(masters, masters.stat().st_size // 3)
    with opened(codec="small") as store:
        report = store.fsck(read_data=True)
        hits = [hit for finding in report.findings for hit in finding.hits]
        assert {hit.split(" ")[0] for hit in hits} == {"run@1", "run@2"}
        assert all(hit.split(": ")[1].startswith("masters.") for hit in hits)
        with pytest.raises(tsck.DamageError):
            store.checkout("run")
        state = training.train()
        third = store.put_snapshot(state, ref="run", step=3, expect=tsck.ANY)
        assert same(store.checkout(third.root), state)
        found = next(group for group in store.show("run").groups if group.name == "masters")
        assert found.codecs == {"planes": 4 * SIZE, "delta": 2 * 4 * SIZE}
        flip_byte(masters, masters.stat().st_size // 3)
        flip_byte(differences, differences.stat().st_size // 3)
        (finding,) = [each for each in store.fsck(read_data=True).findings if each.severity == "error"]
        assert finding.object.endswith(differences.name), "a difference has a checksum of its own"


def flip_byte(pack: Path, at: int) -> None:
    data = bytearray(pack.read_bytes())
    data[at] ^= 1
    pack.write_bytes(data)


def test_what_is_staged_may_be_a_difference(opened: Open, tmp_path: Path) -> None:
    training = Training()
    with opened(codec="small", staging=tmp_path / "staging") as store:
        puts = [(store.put_snapshot_async(state := training.train(), ref="run", step=training.step), state) for _ in range(4)]
        puts[0][0].wait()
        puts += [(store.put_snapshot_async(state := training.train(), ref="run", step=training.step), state) for _ in range(2)]
        published = [(pending.wait(), state) for pending, state in puts]
    with opened() as elsewhere:
        assert all(same(elsewhere.checkout(snapshot.root), state) for snapshot, state in published)
        assert "delta" in {codec for group in elsewhere.show("run").groups for codec in group.codecs}
        assert elsewhere.fsck(read_data=True).ok


@pytest.mark.parametrize("staged", [False, True])
def test_weights_that_stay_when_their_masters_do_not(opened: Open, tmp_path: Path, staged: bool) -> None:
    """They are the roundings of masters that the later snapshot has not."""
    options: dict[str, Any] = {"staging": tsck.Staging(tmp_path / "staging", stagger_seconds=3600 if staged else 0)} if staged else {}
    noise = torch.randn(SIZE)
    rounded = noise.bfloat16().float()
    states: list[dict[str, Any]] = [
        {"masters": masters, "weights": noise.bfloat16(), "step": step}
        for step, masters in enumerate([noise, rounded, torch.nextafter(rounded, torch.tensor(9.0))])
    ]
    with opened(codec="fast", **options) as store:
        for state in states:
            pending = store.put_snapshot_async(state, ref="run", step=state["step"])
            (pending.staged if staged else pending).wait(PATIENCE_SECONDS)
        store.drain(0)
    with opened(codec="fast", **({"staging": tmp_path / "staging"} if staged else {})) as store:
        for state in states:
            found = store.checkout(f"run@{state['step']}")
            assert torch.equal(found["masters"], state["masters"])
            assert torch.equal(found["weights"].view(torch.int16), state["weights"].view(torch.int16))
        assert store.fsck(read_data=True).ok


MASTER = 3 << 19
"""Elements: its weights are one block of 3 MiB, which has two bases, and other masters of half as many are a block of 3 MiB, too."""

READER = Path(tsck.__file__).parent / "standalone" / "tsck_read.py"


def zeros(name: str, elements: int) -> dict[str, torch.Tensor]:
    return {f"{name}_master": torch.zeros(elements), f"{name}_weights": torch.zeros(elements, dtype=torch.bfloat16)}


@pytest.mark.parametrize("one_save", [False, True])
@pytest.mark.parametrize("old_build", [False, True])
def test_a_master_that_is_stored_as_weights_of_the_same_bytes(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_save: bool, old_build: bool
) -> None:
    """Its own weights are no cast of it. Builds that stored them as such wrote snapshots that they could not read."""
    first, second = zeros("a", MASTER), zeros("b", MASTER // 2)
    if one_save:  # each block is a run, in the order of the tensors
        monkeypatch.setattr(part_writer, "RUN_BLOCKS", 1)
        monkeypatch.setattr(part_writer, "for_each", lambda tasks, work, _: for_each(sorted(tasks, key=lambda run: run[0].tensor), work, 1))
    if old_build:
        monkeypatch.setattr(part_writer.RunWriter, "may_be_cast", lambda *_: False)
    with opened(codec="fast") as store:
        for step, state in enumerate([first | second] if one_save else [first, second]):
            store.put_snapshot(state, ref="run", step=step)
            found = store.checkout("run")
            assert found.keys() == state.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        assert store.fsck(read_data=True).ok
        casts = {group.name for group in store.show("run").groups if "cast" in group.codecs}
        assert casts & {"b_master", "b_weights"} == ({"b_master", "b_weights"} if old_build else {"b_master"})
    file = tmp_path / "read.safetensors"
    subprocess.run([sys.executable, READER, tmp_path / "store", "run", file], check=True, capture_output=True)
    assert not any(tensor.any() for tensor in load_file(file).values())


def test_what_nobody_could_read_is_not_saved_and_fsck_tells(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a build that reads no cast of a cast, or one that wrote a longer chain of them."""
    monkeypatch.setattr(part_writer.RunWriter, "may_be_cast", lambda *_: False)
    with opened(codec="fast") as store:
        for state in (zeros("a", MASTER), zeros("b", MASTER // 2)):
            store.put_snapshot(state, ref="run")
        monkeypatch.setattr(reachability, "SEVERAL_LEVELS", 1)
        [found] = [found for found in store.fsck().findings if found.severity == "error"]
        assert found.kind == "corrupt_object"
        assert "invalid delta bases" in found.message
        with pytest.raises(CorruptObjectError, match="invalid delta bases"):
            store.put_snapshot(zeros("c", MASTER // 2), ref="run")
        assert len(store.log("run")) == 2


@pytest.mark.parametrize("backwards", [False, True])
def test_weights_are_rounded_from_masters_that_were_restored(opened: Open, monkeypatch: pytest.MonkeyPatch, backwards: bool) -> None:
    """And not from ones that are read a second time. Weights whose turn comes before their masters' wait for them, here and in a save."""
    if backwards:
        for module in (part_writer, block_reader):
            monkeypatch.setattr(module, "for_each", lambda tasks, work, threads: for_each(tasks[::-1], work, threads=1))
    with opened(codec="fast") as store:
        [(saved, state)] = put_steps(store, 1)
        assert share(saved) < 0.66  # masters take 0.83
        backend, read = store.engine.backend, 0

        def counted(name: str, offset: int, into: memoryview) -> None:
            nonlocal read
            read += len(into)
            read_into(name, offset, into)

        read_into = backend.read_into
        monkeypatch.setattr(backend, "read_into", counted)
        into = Training().train()
        store.checkout("run", into=into)
        assert same(into, state)
        assert read < store.usage().stored_bytes
        alone = store.checkout("run", select="weights.*")["weights"]
        assert all(torch.equal(alone[name], tensor) for name, tensor in state["weights"].items())
