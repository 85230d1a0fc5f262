"""`tsck log`: where branches are, what training was taken back from, lines that fit a terminal, and short roots."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck_package
from tests.cli.conftest import Tsck


@pytest.fixture
def taken_back(tmp_path: Path) -> list[str]:
    """A store whose branch runs/a has steps 1 to 5 and went back to 3; the roots."""
    with tsck_package.open(tmp_path / "ck", create=True, cache_dir=tmp_path / "cache") as store:
        roots = [store.put_snapshot({"w": torch.full((8,), float(step))}, ref="runs/a", step=step).root for step in range(1, 6)]
        store.reset("runs/a", "runs/a@3")
    return roots


def states(text: str) -> list[tuple[int, str]]:
    """(step, state) of each row."""
    return [
        (int(row[0]), row[1] or "") for row in re.findall(r"^runs/a +\w+ +(\d+)  .*?(?:iB|B)(?:  (head|abandoned))?$", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, None])
def test_the_head_comes_first_and_what_was_abandoned_is_marked(tsck: Tsck, taken_back: list[str], limit: int | None) -> None:
    rows = [(3, "head"), (5, "abandoned"), (4, "abandoned"), (2, ""), (1, "")]
    assert states(tsck("log", *(() if limit is None else ("-n", str(limit)))).out) == rows[:limit]


def test_a_save_that_continues_an_earlier_one_abandons_the_later_ones(tsck: Tsck, taken_back: list[str], tmp_path: Path) -> None:
    with tsck_package.open(tmp_path / "ck", cache_dir=tmp_path / "cache") as store:
        store.checkout("runs/a@3")
        store.put_snapshot({"w": torch.zeros(8)}, ref="runs/a", step=4)
        log = store.log("runs/a")
        steps = {snapshot.id: snapshot.step for snapshot in log}
        assert [steps[name] for name in log.heads] == [4]
        assert sorted((steps[name] for name in log.abandoned), key=str) == [4, 5]
        assert states(tsck("log").out)[0] == (4, "head")
        store.branch("kept", taken_back[4])
        assert not store.log().abandoned & {store.resolve("kept").id}, "another branch is there"


def test_a_snapshot_is_marked_with_all_branches_whose_head_it_is(tsck: Tsck, taken_back: list[str]) -> None:
    for name, address in (("exp/x", "runs/a"), ("exp/y", "runs/a@2")):
        assert tsck("branch", name, address).code == 0
    for shown in (tsck("log").out, tsck("log", "runs/a").out):
        heads = re.findall(r" (\d)  20.*  (head.*)$", shown, re.MULTILINE)
        assert {*heads} == {("3", "head of exp/x, runs/a"), ("2", "head of exp/y")}
    assert re.search(r" 2  20.*  head of exp/y$", tsck("log", "exp/y").out, re.MULTILINE)


def test_metrics_that_a_terminal_has_no_room_for_are_counted(tsck: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tsck_package.open(tmp_path / "ck", create=True, cache_dir=tmp_path / "cache") as store:
        metrics = {f"eval_metric_{number}": number / 7 for number in range(39)} | {"loss": 0.25}
        store.put_snapshot({"w": torch.zeros(8)}, ref="runs/a", step=1, metrics=metrics)
    whole = tsck("log").out
    assert "eval_metric_38=" in whole, "a file or a pipe has all"
    monkeypatch.setattr("tensorstore_ck.cli.output.stdout_is_terminal", lambda: True)
    for columns, metrics_shown in ((80, r"\+40"), (90, r"loss=0\.25 \+39")):
        monkeypatch.setattr(shutil, "get_terminal_size", lambda columns=columns: os.terminal_size((columns, 24)))
        shown = tsck("log").out
        assert max(map(len, shown.splitlines())) <= columns
        assert re.search(rf"  {metrics_shown}$", shown, re.MULTILINE), shown


def test_a_short_root_is_found_where_no_ref_has_that_name(tsck: Tsck, taken_back: list[str], tmp_path: Path) -> None:
    short = taken_back[1][:6]
    assert tsck("show", short, "--json").json["snapshot"]["step"] == 2
    with tsck_package.open(tmp_path / "ck", cache_dir=tmp_path / "cache") as store:
        store.tag(short, taken_back[0])
    assert tsck("show", short, "--json").json["snapshot"]["step"] == 1, "the tag"
    assert tsck("show", taken_back[1][:3]).code == 25


@pytest.mark.parametrize(
    ("typed", "shown"), [("2TB", "2 TB"), ("1.5GiB", "1.5 GiB"), ("500MB", "500 MB"), ("1234567891", "1.1 GiB"), ("7", "7 B")]
)
def test_sizes_are_shown_as_they_are_typed(tsck: Tsck, typed: str, shown: str) -> None:
    assert tsck("init", "ck").code == 0
    assert tsck("policy", "set", "runs/*", "keep_last=2", f"max_bytes={typed}").code == 0
    assert f"max_bytes {shown}\n" in tsck("policy", "show").out
    assert tsck("quota", "set", "runs/*", "--refuse", typed).code == 0
    assert f"  {shown}  " in tsck("quota", "show").out


def test_a_missing_argument_is_one_line(tsck: Tsck) -> None:
    done = tsck("completion")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "\\n" not in done.err


def test_the_package_is_a_program(tsck: Tsck) -> None:
    done = subprocess.run([sys.executable, "-m", "tensorstore_ck", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == tsck("--version").out


@pytest.fixture
def trained(tsck: Tsck, tmp_path: Path) -> Tsck:
    """`tsck` on a store whose branch runs/a has three steps with a falling rate."""
    with tsck_package.open(tmp_path / "ck", create=True, cache_dir=tmp_path / "cache") as store:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
            attributes: dict[str, float | str] = {"lr": 10.0**-step, "who": f"ada\x1b{step}"}
            config = {"config": {"dropout": 0.1}}
            store.put_snapshot({"w": step}, ref="runs/a", step=step, metrics={"loss": loss}, metadata=config, attributes=attributes)
    return tsck


def test_a_history_is_searched_and_sorted(trained: Tsck) -> None:
    def steps(*options: str) -> list[int]:
        found: list[int] = [row["step"] for row in trained("log", "runs/a", *options, "--json").json]
        return found

    assert steps("--where", "lr < 0.05 and config.dropout = 0.1") == [3, 2]
    assert steps("--sort", "loss") == [2, 1, 3]
    assert steps("--sort", "loss", "--desc", "-n", "1") == [3]
    assert steps("--where", "loss < 0.7", "-n", "1") == [2], "the limit counts what was found"
    shown = trained("log", "--where", "lr < 0.05", "--sort", "who").out
    assert r"loss=0.25 lr=0.01 who=ada\x1b2" in shown
    assert trained("show", "runs/a^best:loss", "--json").json["snapshot"]["step"] == 2


def test_a_search_that_finds_nothing_or_is_wrong(trained: Tsck) -> None:
    assert trained("log", "--where", "loss < 0").out == "no snapshot matches\n"
    assert "did you mean loss" in trained("log", "--where", "los < 0").err
    assert "near 'AND" not in trained("log", "--where", "loss < 1 AND loss > 0").out
    assert "--desc is for --sort" in trained("log", "--desc").err
    assert "ends too early" in trained("log", "--where", "loss <").err
