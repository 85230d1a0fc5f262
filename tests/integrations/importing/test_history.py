"""Several checkpoints of one run as a history: `tsck import --history`, `tsck.import_history`, and the folders that need it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.opening import init_store
from tests.cli.conftest import Tsck
from tests.cli.conftest import tsck as tsck_command
from tests.effort import in_turns
from tests.end_to_end.crash.faulty import MODES, Death, Faults, FaultyBackend
from tests.end_to_end.crash.test_every_call import open_over
from tests.integrations.importing.same import require_same

run = tsck_command
SAVED_EVERY = 5
KILLED_STEPS = 20


def train(folder: Path, steps: int, **more: Any) -> dict[int, dict[str, Any]]:
    """A training loop that saves as such loops do; step -> what it saved."""
    folder.mkdir()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 60), nn.GELU(), nn.Linear(60, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * SAVED_EVERY)
    saved = {}
    for step in range(SAVED_EVERY, steps * SAVED_EVERY + 1, SAVED_EVERY):
        loss = model(torch.randn(8, 20)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "step": step,
            "trainer": {"global_step": torch.tensor(step)},
            "val_loss": loss.item(),
            **more,
        }
        torch.save(state, folder / f"step_{step}.pt")
        saved[step] = torch.load(folder / f"step_{step}.pt")
    return saved


def require_history(store: tsck.Store, ref: str, saved: dict[int, dict[str, Any]]) -> None:
    """One snapshot a step, in order, each with what was saved."""
    log = store.log(ref)
    assert [snapshot.step for snapshot in log] == sorted(saved, reverse=True)
    assert [snapshot.parent for snapshot in log] == [*(snapshot.root for snapshot in log[1:]), None]
    for snapshot in log:
        assert snapshot.step is not None
        require_same(store.checkout(snapshot.root), saved[snapshot.step])


def hint_in(message: str) -> list[str]:
    """The command in a message, without its first word."""
    (found,) = re.findall(r"`tsck (import --history [^`]*)`", message)
    return shlex.split(found)


@pytest.mark.slow
@pytest.mark.race
def test_a_command_that_was_killed_runs_again(run: Tsck, tmp_path: Path) -> None:
    saved = train(tmp_path / "old", KILLED_STEPS)
    run("init", "ck")
    refused = run("import", "old/", "--ref", "runs/gpt")
    assert (refused.code, run("branch", "--json").json) == (26, {})
    command = [*hint_in(refused.err), "--metric", "val_loss=key:val_loss"]
    assert command[:6] == ["import", "--history", "old/*.pt", "--step-from", "name", "--ref"]

    environment = {"TSCK_STORE": "ck", "TSCK_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(Path(tsck.__file__).parents[1])}
    arguments = [sys.executable, "-m", "tensorstore_ck.cli", *command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"5/{KILLED_STEPS} "):
                process.kill()
                break
    assert process.returncode == -9
    before = run("log", "runs/gpt", "--json").json
    assert 5 <= len(before) < KILLED_STEPS

    again = run(*command)
    assert again.code == 0, again
    lines = again.out.splitlines()
    assert len(lines) == KILLED_STEPS + 1
    assert all(("is there already" in line) == (number < len(before)) for number, line in enumerate(lines[:-1]))
    assert f"{KILLED_STEPS - len(before)} snapshots imported, {len(before)} snapshots were there already" in lines[-1]
    log = run("log", "runs/gpt", "--json").json
    assert log[-len(before) :] == before
    assert [snapshot["metrics"] for snapshot in reversed(log)] == [{"val_loss": saved[step]["val_loss"]} for step in sorted(saved)]
    assert len(run("log", "runs/gpt", "--plot", "val_loss").out.splitlines()) == KILLED_STEPS + 1
    with tsck.open(tmp_path / "ck", cache_dir=tmp_path / "cache") as store:
        require_history(store, "runs/gpt", saved)
        assert store.fsck(read_data=True).ok


def test_a_dry_run_says_what_would_be_imported(run: Tsck, tmp_path: Path) -> None:
    train(tmp_path / "old", 3)
    run("init", "ck")
    arguments = ("import", "--history", "old/*.pt", "--step-from", "name", "--ref", "new", "--metric", "loss=key:val_loss", "--dry-run")
    done = run(*arguments)
    assert [line.split()[:2] for line in done.out.splitlines()[1:-1]] == [["5", "step_5.pt"], ["10", "step_10.pt"], ["15", "step_15.pt"]]
    assert "nothing was written" in done.out
    assert [each["step"] for each in run(*arguments, "--json").json["plan"]] == [5, 10, 15]
    assert run("branch", "--json").json == {}
    document = run(*arguments[:-1], "--json").json
    assert [(step["snapshot"]["step"], step["was_there"]) for step in document["steps"]] == [(5, False), (10, False), (15, False)]


WRONG: list[tuple[tuple[str, ...], int, str]] = [
    (("--history", "old/*.pt"), 2, "--history needs --step-from"),
    (("old", "--step-from", "name"), 2, "--step-from is for --history"),
    (("--history", "old/*.pt", "--step-from", "name", "--step", "3"), 2, "--step is for a single"),
    (("--history", "old/*.pt", "--step-from", "name", "--as-one"), 2, "--as-one is for a single"),
    (("--history", "old/*.pt", "--step-from", "name", "--partial"), 2, "--partial is for a single"),
    (("old/step_5.pt", "old/step_10.pt"), 2, "--history imports each"),
    (("old/step_5.pt", "--metric", "a=key:val_loss"), 2, "is for --history"),
    (("old/step_5.pt", "--metric", "a=low"), 2, "NAME=NUMBER"),
    (("--history", "old/*.pt", "--step-from", "names"), 22, "step_from must be 'name' or 'key:PATH'"),
    (("--history", "old/*.pt", "--step-from", "key:"), 22, "step_from must be"),
    (("--history", "old/*.ckpt", "--step-from", "name"), 25, "nothing matches old/*.ckpt"),
    (("--history", "old/step_7.pt", "--step-from", "name"), 25, "there is no file old/step_7.pt"),
    (("--history", "old/*.pt", "--step-from", "key:global_stp"), 25, "step_10.pt has nothing at 'global_stp'; it has: model,"),
    (("--history", "old/*.pt", "--step-from", "key:val_loss"), 27, "not a training step"),
    (("--history", "old/*.pt", "--step-from", "key:model"), 27, "is a OrderedDict, not a training step"),
    (("--history", "old/*.pt", "--step-from", "name", "--metric", "a=key:nope"), 25, "has nothing at 'nope'"),
    (("--history", "old/*.pt", "--step-from", "name", "--metric", "a=key:model.0.weight"), 27, "is a Tensor, not a number"),
    (("--history", "old", "--step-from", "name"), 22, "old does not contain its step"),
]


def test_wrong_arguments_are_named(run: Tsck, tmp_path: Path) -> None:
    train(tmp_path / "old", 2)
    run("init", "ck")
    for arguments, code, message in WRONG:
        done = run("import", *arguments, "--ref", "new")
        assert (done.code, message in done.err, done.err.count("\n")) == (code, True, 1), done
    assert run("branch", "--json").json == {}


WRONG_IN_PYTHON: list[tuple[dict[str, Any], str]] = [
    ({"step_from": 3}, "step_from"),
    ({"step_from": "step"}, "step_from"),
    ({"metrics": ["val_loss"]}, "metrics"),
    ({"metrics": {"val_loss": "val_loss"}}, "metrics"),
    ({"metrics": {"val_loss": None}}, "val_loss"),
    ({"paths": []}, "paths"),
    ({"paths": 3}, "paths"),
    ({"paths": [3]}, "paths"),
    ({"ref": "no good"}, "'no good'"),
    ({"metadata": {"x": object()}}, "metadata.x"),
]


def test_wrong_arguments_in_python(store: tsck.Store, tmp_path: Path) -> None:
    train(tmp_path / "old", 2)
    for arguments, named in WRONG_IN_PYTHON:
        with pytest.raises(tsck.InputError) as caught:
            tsck.import_history(store, **{"paths": str(tmp_path / "old" / "*.pt"), "ref": "new", "step_from": "name", **arguments})
        assert caught.value.object_id == named
    assert store.branches() == {}


# --- where a step comes from ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["step_100.pt", "step_20.pt"], [100, 20]),
        (["epoch=1-step=100.ckpt", "epoch=2-step=200-v1.ckpt"], [100, 200]),
        (["epoch=1-val_loss=0.31.ckpt", "epoch=2-val_loss=0.20.ckpt"], [1, 2]),
        (["global_step300", "global_step_400"], [300, 400]),
        (["rl_model_1000_steps.zip", "rl_model_2000_steps.zip"], [1000, 2000]),
        (["checkpoint-500", "checkpoint-1000"], [500, 1000]),
        (["gpt2_0100.pt", "gpt2_0200.pt"], [100, 200]),
        (["iter_0000100", "iter_0000200"], [100, 200]),
        (["7.pt"], [7]),
    ],
)
def test_steps_in_names(tmp_path: Path, names: list[str], steps: list[int]) -> None:
    for number, name in enumerate(names):
        torch.save({"w": torch.full((5,), number)}, tmp_path / name)
    plan = [(Path(each.path).name, each.step) for each in tsck.inspect_history([tmp_path / name for name in names], step_from="name")]
    assert plan == sorted(zip(names, steps, strict=True), key=lambda each: each[1])


def test_a_snapshot_was_made_when_its_file_was(store: tsck.Store, tmp_path: Path) -> None:
    for step in train(tmp_path / "old", 3):
        os.utime(tmp_path / "old" / f"step_{step}.pt", (step, step))
    tsck.import_history(store, tmp_path / "old" / "*.pt", ref="runs/old", step_from="name")
    found = store.log("runs/old")
    assert [snapshot.time_ns for snapshot in found] == [15 * 10**9, 10 * 10**9, 5 * 10**9]
    assert all(snapshot.arrived_ns > 10**18 for snapshot in found)


def test_two_files_of_one_step_are_both_named(store: tsck.Store, tmp_path: Path) -> None:
    for name in ("a_step_3.pt", "b_step_3.pt", "c_step_4.pt"):
        torch.save({"step": int(name[7])}, tmp_path / name)
    for step_from in ("name", "key:step"):
        with pytest.raises(tsck.AmbiguousAddressError, match=r"a_step_3\.pt and .*b_step_3\.pt both have step 3"):
            tsck.import_history(store, str(tmp_path / "*.pt"), ref="new", step_from=step_from)
    assert store.branches() == {}


def test_values_by_path(store: tsck.Store, tmp_path: Path) -> None:
    state = {
        "trainer": {"global.step": torch.tensor([7]), "log": [{"loss": 0.5}, {"loss": 0.25}]},
        3: {"loss": 2},
        "bad": True,
        "nan": float("nan"),
    }
    torch.save(state, tmp_path / "a.pt")
    metrics: dict[str, str | float] = {"loss": "key:trainer.log.1.loss", "third": "key:3.loss", "lr": 0.1, "nan": "key:nan"}
    (step,) = tsck.import_history(store, tmp_path / "a.pt", ref="new", step_from="key:trainer.global.step", metrics=metrics)
    assert step.snapshot.step == 7
    assert {name: step.snapshot.metrics[name] for name in ("loss", "third", "lr")} == {"loss": 0.25, "third": 2.0, "lr": 0.1}
    for wrong in ("bad", "nan", "trainer", "trainer.log.2", "trainer.log.1.loss.x"):
        with pytest.raises(tsck.InputError, match=r"a\.pt"):
            tsck.inspect_history(tmp_path / "a.pt", step_from=f"key:{wrong}")


def test_the_frames_of_an_error_can_be_printed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As pytest, debuggers and reporters of errors do, when the file is no longer mapped by the import."""
    torch.save({"w": torch.full((100_000,), 7), "step": "seven"}, tmp_path / "a.pt")
    caplog.set_level("DEBUG", "tensorstore_ck")  # at other levels an error has the caller's frames alone
    with pytest.raises(tsck.MismatchError, match="not a training step") as caught:
        tsck.inspect_history(tmp_path / "a.pt", step_from="key:step")
    shown = "".join(repr(entry.frame.f_locals) for entry in caught.traceback)
    assert "tensor([7, 7, 7" in shown


# --- again, on top, concurrently ---------------------------------------------------------------------------------------


def test_run_again_after_more_was_saved(store: tsck.Store, tmp_path: Path) -> None:
    saved = train(tmp_path / "old", 4)
    last = tmp_path / "old" / "step_20.pt"
    last.rename(tmp_path / "later.pt")
    first = tsck.import_history(store, tmp_path / "old/step_*.pt", ref="new", step_from="name")
    (tmp_path / "later.pt").rename(last)
    again = tsck.import_history(store, tmp_path / "old/step_*.pt", ref="new", step_from="name", metrics={"loss": "key:val_loss"})
    assert [step.was_there for step in again] == [True, True, True, False]
    assert [step.snapshot.root for step in again[:3]] == [step.snapshot.root for step in first]
    require_history(store, "new", saved)
    assert [snapshot.metrics["loss"] for snapshot in store.log("new")] == [saved[step]["val_loss"] for step in (20, 15, 10, 5)]
    entries = store.engine.log.sync().n
    tsck.import_history(store, tmp_path / "old/step_*.pt", ref="new", step_from="name", metrics={"loss": "key:val_loss"})
    assert store.engine.log.sync().n == entries


def change_a_weight(state: dict[str, Any]) -> None:
    state["model"]["0.weight"][3, 4] += 1


def change_a_value(state: dict[str, Any]) -> None:
    state["val_loss"] += 1


def change_a_large_value(state: dict[str, Any]) -> None:
    state["text"] = "b" + state["text"][1:]


@pytest.mark.parametrize("change", [change_a_weight, change_a_value, change_a_large_value])
def test_what_is_there_must_come_from_the_file(store: tsck.Store, tmp_path: Path, change: Any) -> None:
    saved = train(tmp_path / "old", 3, text="a" * 200_000)
    tsck.import_history(store, str(tmp_path / "old/*.pt"), ref="new", step_from="name")
    assert all(step.was_there for step in tsck.import_history(store, str(tmp_path / "old/*.pt"), ref="new", step_from="name"))
    change(saved[10])
    torch.save(saved[10], tmp_path / "old" / "step_10.pt")
    with pytest.raises(tsck.MismatchError, match=r"new@10 is already on the branch, and differs from .*step_10\.pt"):
        tsck.import_history(store, str(tmp_path / "old/*.pt"), ref="new", step_from="name")
    with pytest.raises(tsck.MismatchError, match="other values were excluded"):
        tsck.import_history(store, str(tmp_path / "old/step_5.pt"), ref="new", step_from="name", exclude=["val_loss"])
    assert len(store.log("new")) == 3


def test_a_history_is_imported_in_order(store: tsck.Store, tmp_path: Path) -> None:
    train(tmp_path / "old", 3)
    store.put_snapshot({"w": torch.ones(4)}, ref="new", step=1)
    tsck.import_history(store, str(tmp_path / "old/step_1?.pt"), ref="new", step_from="name")
    assert [snapshot.step for snapshot in store.log("new")] == [15, 10, 1]
    with pytest.raises(tsck.InvalidOptionError, match=r"step_5\.pt has step 5, and new is already at step 15"):
        tsck.import_history(store, str(tmp_path / "old/*.pt"), ref="new", step_from="name")
    store.tag("paper", "new")
    with pytest.raises(tsck.InvalidOptionError, match="is a tag"):
        tsck.import_history(store, str(tmp_path / "old/*.pt"), ref="paper", step_from="name")
    assert len(store.log("new")) == 3


def test_a_file_that_changes_meanwhile(store: tsck.Store, tmp_path: Path) -> None:
    train(tmp_path / "old", 3)

    def overwrite(plan: object) -> None:
        (tmp_path / "old" / "step_10.pt").write_bytes((tmp_path / "old" / "step_15.pt").read_bytes())

    with pytest.raises(tsck.SnapshotAbortedError, match=r"step_10\.pt changed during the import"):
        tsck.import_history(store, str(tmp_path / "old/*.pt"), ref="new", step_from="key:step", planned=overwrite)
    assert [snapshot.step for snapshot in store.log("new")] == [5]


def test_damage_is_found_at_its_file(store: tsck.Store, tmp_path: Path) -> None:
    saved = train(tmp_path / "old", 3)
    path = tmp_path / "old" / "step_10.pt"
    good = path.read_bytes()
    weight = saved[10]["model"]["0.weight"].numpy().tobytes()
    at = good.index(weight)
    path.write_bytes(good[: at + 5] + bytes([good[at + 5] ^ 1]) + good[at + 6 :])
    with pytest.raises(tsck.CorruptObjectError, match=r"step_10\.pt is damaged"):
        tsck.import_history(store, str(tmp_path / "old/*.pt"), ref="new", step_from="name")
    path.write_bytes(good)
    tsck.import_history(store, str(tmp_path / "old/*.pt"), ref="new", step_from="name")
    require_history(store, "new", saved)


@pytest.mark.slow
@pytest.mark.race
def test_every_backend_call_fails_once(tmp_path: Path) -> None:
    """Whatever happens to an import, the same import afterwards leaves each step once, in order, and whole."""
    saved = train(tmp_path / "old", 3)
    struck = set()
    for at, mode in in_turns(range(1, 1000), MODES):
        backend = MemoryBackend()
        init_store(backend)
        faults = Faults(mode, at)
        try:
            store = open_over(FaultyBackend(backend, faults, atomic_put=True))
            tsck.import_history(store, str(tmp_path / "old/*.pt"), ref="new", step_from="name")
        except (Death, tsck.StoreError):
            pass
        if faults.later is not None:
            faults.later()
        fresh = open_over(backend)
        tsck.import_history(fresh, str(tmp_path / "old/*.pt"), ref="new", step_from="name")
        require_history(fresh, "new", saved)
        if not faults.struck:
            break
        struck.add(faults.struck.split()[0])
    assert {"open", "append", "close", "put", "create"} <= struck


# --- folders: one checkpoint, or several steps ------------------------------------------------------------------------


def save_lightning(folder: Path) -> None:
    for epoch, step in ((1, 100), (2, 200)):
        state = {"pytorch-lightning_version": "2.5", "state_dict": {"w": torch.full((5,), step)}, "global_step": step, "epoch": epoch}
        torch.save(state, folder / f"epoch={epoch}-step={step}.ckpt")
    torch.save(state, folder / "last.ckpt")


def save_counters(folder: Path) -> None:
    for number in range(3):
        torch.save({"model": {"w": torch.full((5,), number)}, "global_step": 10 * number}, folder / f"{'abc'[number]}.pt")
    (folder / "notes.txt").write_text("no checkpoint")


def save_epochs(folder: Path) -> None:
    for epoch in range(3):
        torch.save({"w": torch.full((5,), epoch)}, folder / f"model_epoch_{epoch}.pth")
    save_file({"w": torch.ones(4)}, folder / "base.safetensors")


def save_dcp(folder: Path) -> None:
    for step in (10, 20):
        dcp_save({"w": torch.full((5,), step)}, storage_writer=FileSystemWriter(folder / f"step-{step}"), no_dist=True)


def save_with_brackets(folder: Path) -> None:
    for step in (10, 20):
        torch.save({"w": torch.full((5,), step)}, folder / f"it's [run 1] step={step}.pt")
    torch.save({"w": torch.ones(5)}, folder / "best [run 1].pt")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("save", "steps"),
    [
        (save_lightning, [200, 100]),
        (save_counters, [20, 10, 0]),
        (save_epochs, [2, 1, 0]),
        (save_dcp, [20, 10]),
        (save_with_brackets, [20, 10]),
    ],
)
def test_a_folder_of_several_steps_is_refused_with_the_command(run: Tsck, tmp_path: Path, save: Any, steps: list[int]) -> None:
    (tmp_path / "my [old] runs").mkdir()
    save(tmp_path / "my [old] runs")
    run("init", "other")
    for arguments in ((), ("--dry-run",)):
        refused = run("import", "my [old] runs", "--ref", "runs/a", "-s", "other", *arguments)
        assert (refused.code, refused.err.count("\n")) == (26, 1), refused
    assert run("branch", "--json", store="other").json == {}
    refused = run("import", "my [old] runs", "--ref", "runs/a", "-s", "other")
    done = run(*hint_in(refused.err))
    assert done.code == 0, (refused, done)
    assert [snapshot["step"] for snapshot in run("log", "runs/a", "--json", store="other").json] == steps
    as_one = run("import", "my [old] runs", "--ref", "one", "-s", "other", "--as-one")
    assert (as_one.code, "found a folder of" in as_one.out) == (0, True), as_one
    assert len(run("log", "one", "--json", store="other").json) == 1


def test_files_of_one_step_among_others(run: Tsck, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for step in (1, 2):
        for name in ("model", "optimizer"):
            torch.save({"w": torch.full((5,), step)}, tmp_path / "old" / f"{name}_step_{step}.pt")
    run("init", "ck")
    refused = run("import", "old", "--ref", "new")
    assert refused.code == 26
    assert re.search(
        r"model_step_1\.pt and optimizer_step_1\.pt have the same step: move the files of each step to a separate folder", refused.err
    )
    for step in (1, 2):
        (tmp_path / "steps" / f"step_{step}").mkdir(parents=True)
        for path in (tmp_path / "old").glob(f"*_{step}.pt"):
            path.rename(tmp_path / "steps" / f"step_{step}" / path.name)
    assert run("import", "--history", "steps/*", "--step-from", "name", "--ref", "new").code == 0
    assert len(run("log", "new", "--json").json) == 2


def save_accelerate(folder: Path) -> None:
    save_file({"w": torch.ones(5)}, folder / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin")
    torch.save({"last_epoch": 3, "_step_count": 4}, folder / "scheduler.bin")
    torch.save({"last_epoch": 3, "_step_count": 8}, folder / "scheduler_1.bin")
    for rank in range(2):
        torch.save({"step": 3, "torch_manual_seed": torch.get_rng_state()}, folder / f"random_states_{rank}.pkl")
        torch.save({"step": 10 * rank, "average": torch.ones(4)}, folder / f"custom_checkpoint_{rank}.pkl")


def save_shards(folder: Path) -> None:
    for shard in (1, 2):
        save_file({f"w{shard}": torch.ones(5)}, folder / f"model-{shard:05}-of-00002.safetensors")
        torch.save({f"w{shard}": torch.ones(5)}, folder / f"checkpoint-{shard:05}-of-00002.pt")


def save_fsdp_ranks(folder: Path) -> None:
    for rank in (0, 8):
        torch.save({"w": torch.full((5,), rank), "global_step": 70}, folder / f"step_70_rank_{rank}.pt")


def save_models(folder: Path) -> None:
    for name in ("unet_512.pt", "unet_768.pt", "vae.pt"):
        torch.save({"w": torch.ones(5)}, folder / name)


def save_one_step(folder: Path) -> None:
    for name in ("model", "ema", "optimizer"):
        torch.save({"w": torch.ones(5), "step": 100}, folder / f"{name}_step_100.pt")


@pytest.mark.parametrize("save", [save_accelerate, save_shards, save_fsdp_ranks, save_models, save_one_step])
def test_folders_of_ranks_and_models_are_one_snapshot(run: Tsck, tmp_path: Path, save: Any) -> None:
    (tmp_path / "old").mkdir()
    save(tmp_path / "old")
    run("init", "ck")
    done = run("import", "old", "--ref", "new")
    assert (done.code, f"found a folder of {len(list((tmp_path / 'old').iterdir()))} checkpoints" in done.out) == (0, True), done
    assert len(json.loads(run("log", "new", "--json").out)) == 1
