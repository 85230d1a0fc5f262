"""pin, unpin, forget, undo and gc, as a user runs them."""

import re
import warnings
from pathlib import Path

import pytest

import tensorstore_ck as tsck_package
from tests.cli.conftest import Tsck

NOW = ("--undo-window", "0s", "--min-age", "0s", "--max-delete", "100%")


def test_pins(history: Tsck) -> None:
    assert "no pins" in history("pin").out
    assert history("pin", "runs/gpt~1", "--reason", "mmlu", "--owner", "ada", "--expires", "7d").code == 0
    line = history("pin").out.splitlines()[1]
    assert "ada" in line
    assert "mmlu" in line
    [shown] = [line for line in history("show", "runs/gpt~1").out.splitlines() if line.startswith("pinned by")]
    assert "ada until 20" in shown
    assert [pin["owner"] for pin in history("show", "runs/gpt~1", "--json").json["pins"]] == ["ada"]
    assert "pinned by" not in history("show", "runs/gpt").out
    assert history("unpin", "runs/gpt~1").code == 25
    assert history("unpin", "runs/gpt~1", "--owner", "ada").code == 0
    assert "no pins" in history("pin").out


def test_forget_undo_and_gc(history: Tsck) -> None:
    root = history("log", "runs/gpt", "--json").json[1]["root"]
    history("tag", "v1", "runs/gpt~1")
    assert "STILL HELD BY" in history("forget", root).out
    assert len(history("log", "runs/gpt", "--json").json) == 1
    assert "brought back of branch runs/gpt" in history("undo").out
    assert len(history("log", "runs/gpt", "--json").json) == 2
    history("forget", root[:12], "v1")
    assert "freed: 0 B" in history("gc").out
    assert "of branch runs/gpt: 1 snapshot" in history("forget").out

    before = history("usage", "--json").json["objects_bytes"]
    planned = history("gc", "--dry-run", *NOW, "--json").json
    assert planned["report"]["dry_run"]
    assert [gone["root"] for gone in planned["report"]["snapshots"]] == [root]
    assert history("usage", "--json").json["objects_bytes"] == before
    done = history("gc", *NOW, "--json").json
    assert done["freed_bytes"] == planned["freed_bytes"] > 0
    assert history("undo").code == 25
    assert history("fsck", "--read-data").code == 0


def test_what_was_forgotten_names_undo_where_one_looks_for_it(history: Tsck) -> None:
    history("tag", "v1", "runs/gpt")
    assert history("untag", "v1").out == "removed tag v1; `tsck undo v1` brings it back for a day\n"
    assert history("tag").out.startswith("no tags: 1 tag forgotten; ")
    assert history("forget", "runs/gpt").out.splitlines()[-1].startswith("`tsck undo runs/gpt` brings this back for a day")
    for command in ("log", "branch"):
        assert "1 branch forgotten; `tsck forget` lists what can be brought back, `tsck undo REF` does it" in history(command).out
    for ref in ("v1", "runs/gpt"):
        assert f"it was forgotten; `tsck undo {ref} " in history("show", ref).err
        assert history("undo", ref).code == 0
        assert history("show", ref).code == 0


def test_a_store_without_refs_says_what_makes_the_first(tsck: Tsck) -> None:
    tsck("init", "ck")
    shown = [tsck(command).out for command in ("log", "branch", "tag")]
    put = "`tsck put FILE --ref NAME` makes one\n"
    assert shown == [f"no snapshots yet: {put}", f"no branches yet: {put}", "no tags yet: `tsck tag NAME ADDRESS` makes one\n"]


def test_gc_refuses_to_free_too_much(history: Tsck) -> None:
    history("forget", "runs/gpt")
    refused = history("gc", "--undo-window", "0s", "--min-age", "0s", "--max-delete", "10%")
    assert refused.code == 37
    assert "--max-delete 100%" in refused.err
    assert "nothing was forgotten" not in history("forget").out, "what it would have ended is still there"
    dry = ("gc", "--dry-run", "--undo-window", "0s", "--min-age", "0s", "--max-delete")
    planned = history(*dry, "10%")
    assert planned.code == 0
    assert "would be refused: " in planned.out
    assert "--max-delete 100%" in history(*dry, "10%", "--json").json["report"]["refused"]
    assert history(*dry, "100%", "--json").json["report"]["refused"] is None
    assert "refused" not in history(*dry, "100%").out


def test_policies(history: Tsck) -> None:
    assert "no policies, so every snapshot stays" in history("policy").out
    tried = history("policy", "test", "runs/gpt", "keep_steps=7").out
    assert "newest" in tried
    assert "fallback" in tried
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        rules = ("keep_last=1", "keep_best=2:lost:min", "keep_milestones=no", "keep_triggers=first,last")
        mistyped = history("policy", "set", "runs/*", *rules)
        all_warned = (mistyped, history("policy", "apply"), history("log", "runs/gpt"))
    assert mistyped.out == "runs/*: keep_last 1, keep_best 2 by min lost, keep_triggers first, last, keep_milestones False\n"
    for warned in all_warned:
        assert "keep_best lost: no snapshot has it" in warned.err
    made = history("policy", "set", "runs/*", "keep_last=1", "keep_steps=-1,5", "expire_after=30d")
    assert made.out == "runs/*: keep_last 1, keep_steps -1, 5, expire_after 30d\n"
    assert history("policy", "--json").json["runs/*"]["keep_steps"] == [-1, 5]
    assert made.err == ""
    for mistyped in history("policy", "set", "run/*", "keep_last=1"), history("quota", "set", "run/*", "--warn", "1TB"):
        assert (mistyped.code, mistyped.err) == (0, "tsck: warning: no branch matches 'run/*' yet (branches: runs/gpt)\n")
    history("put", "model.safetensors", "--ref", "runs/gpt", "--step", "3")
    assert [snapshot["step"] for snapshot in history("log", "runs/gpt", "--json").json] == [3, 2]
    told = history("policy", "apply", "--dry-run").out
    assert "runs/gpt: 2 snapshots, by runs/*" in told
    assert "0 snapshots would go" in told
    history("undo", "runs/gpt@1")
    planned = history("policy", "apply", "--dry-run", "--json").json
    assert [(each["snapshot"]["step"], each["stays"]) for each in planned["branches"][0]["snapshots"]] == [(1, False), (2, True), (3, True)]
    assert "1 snapshot went" in history("policy", "apply", "runs/gpt").out
    assert "removed the policy for runs/*" in history("policy", "remove", "runs/*").out
    assert "no policy matches these branches" in history("policy", "apply", "--dry-run").out


def test_a_command_is_run_for_each(history: Tsck, capfd: pytest.CaptureFixture[str]) -> None:
    shown = history("watch", "runs/gpt", "--since-step", "1", "--count", "2", "--exec", "echo step={step} ref={ref}")
    assert shown.code == 0
    assert capfd.readouterr().out.splitlines() == ["step=1 ref=runs/gpt", "step=2 ref=runs/gpt"]
    assert [line.split()[0] for line in shown.out.splitlines()] == ["published"] * 2
    failing = history("watch", "runs/gpt", "--since-step", "2", "--count", "1", "--exec", "false")
    assert (failing.code, failing.err) == (0, "tsck: false for step 2 ended with 1\n")
    assert "could not be run" in history("watch", "runs/gpt", "--since-step", "2", "--count", "1", "--exec", "/none").err
    assert history("pin", "--json").json == []


def test_tier(history: Tsck, tmp_path: Path) -> None:
    assert "no policy has an age rule" in history("tier").out
    made = history("policy", "set", "runs/*", f"move_after=1s:{tmp_path / 'cold'},90d:s3://colder/x", "recode_after=7d")
    assert made.out == f"runs/*: recode_after 1w, move_after 1s to {tmp_path / 'cold'}; 90d to s3://colder/x\n"
    root = history("log", "runs/gpt", "--json").json[0]["root"]
    assert "goes" not in history("policy", "test", "runs/gpt").out
    history("policy", "set", "runs/*", f"move_after=0.001s:{tmp_path / 'cold'}")
    planned = history("tier", "--dry-run")
    assert "would be moved" in planned.out
    assert not (tmp_path / "cold").exists()
    done = history("tier")
    assert str(tmp_path / "cold") in done.out
    assert history("gc", *NOW).code == 0
    assert str(tmp_path / "cold") in history("usage").out
    assert history("get", root, "back.safetensors").code == 0
    assert history("fsck", "--read-data").code == 0
    assert history("tier", "--json").json["packs"] == []


def test_apply_prints_each_snapshot_that_goes(tsck: Tsck, tmp_path: Path) -> None:
    """More than a table has rows otherwise."""
    with tsck_package.open(tmp_path / "ck", create=True, cache_dir=tmp_path / "cache", no_sync=True) as store:
        for step in range(1, 66):
            store.put_snapshot({"step": step}, ref="runs/a", step=step)
        store.put_snapshot({"step": 1}, ref="runs/b", step=1)
    tsck("policy", "set", "runs/*", "keep_last=2")
    lines = tsck("policy", "apply").out.splitlines()
    assert [line.split()[1] for line in lines if " goes " in line] == [str(step) for step in range(63, 0, -1)]
    assert lines[-1].startswith("63 snapshots went; `tsck undo")
    assert tsck("policy", "apply").out.splitlines()[-1] == "0 snapshots went"


def test_money_in_usage_and_policies(history: Tsck) -> None:
    shown = history("usage", "--price", "file=1e9").out
    assert re.search(r"^[\d,.]+ USD a month: [\d,.]+ USD at /", shown, re.M)
    assert re.search(r"^  runs/gpt: [\d,.]+ USD$", shown, re.M)
    assert re.search(r"^  runs: [\d,.]+ USD$", history("usage", "--jobs", "--price", "file=1e9").out, re.M)
    assert "no price was given for /" in history("usage", "--price", "s3=1").out
    assert "USD" not in history("usage").out
    document = history("usage", "--price", "file=1e9", "--json").json
    assert document["usd_per_month"]["refs"]["runs/gpt"] > 0
    tried = history("policy", "test", "runs/gpt", "keep_last=1", "--price", "file=1e9")
    assert re.search(r"^that saves [\d,.]+ USD a month$", tried.out, re.M)
    assert "saves" not in history("policy", "test", "runs/gpt", "keep_last=1").out
    assert history("policy", "show", "--price", "file=1").code != 0
    assert "a price is NAME=USD" in history("usage", "--price", "x=y").err
