"""A team that runs stores for others: rules, quotas, one view of all stores, a second copy, and what goes into a report."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tests.end_to_end.walks.browser import Browser
from tests.end_to_end.walks.walk import Walk

pytestmark = pytest.mark.slow

BAD_RULE = 22


def save(url: str, ref: str, *steps: int, size: int = 20_000) -> None:
    with tsck.open(url) as store:
        if ref in store.branches():
            store.checkout(ref)
        for step in steps:
            torch.manual_seed(step)
            store.put_snapshot({"w": torch.randn(size)}, ref=ref, step=step, metrics={"val_loss": abs(step - 2) + 0.3})


def test_rules_quotas_and_copies(chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Walk(tmp_path, monkeypatch) as walk:
        for name in ("a", "b", "mirror"):
            walk.type(f"tsck init {name}")
        save("a", "runs/gpt", *range(1, 9))
        save("b", "runs/bert", 1, 2)

        # rules: tried first, then set; each snapshot that goes is printed before it goes
        typed = walk.type("tsck policy set 'runs/*' keep_lst=2 -s a", code=BAD_RULE)
        assert "did you mean keep_last?" in typed.text
        short = walk.type("tsck policy set 'runs/*' keep_last=2 keep_best=1:val_loss -s a", code=BAD_RULE)
        assert "or keep_best=3:val_loss:min at a shell, not '1:val_loss'" in short.text
        walk.type("tsck policy set 'runs/*' keep_last=2 keep_best=1:val_loss:min -s a")
        tried = walk.type("tsck policy apply --dry-run -s a")
        walk.follow(tried, "gc")
        assert [line.split()[1] for line in tried.lines if " goes " in line] == ["6", "5", "4", "3", "1"]
        assert len(walk.type("tsck log runs/gpt -s a").lines) == 9
        applied = walk.type("tsck policy apply -s a")
        assert [line.split()[1] for line in walk.type("tsck log runs/gpt -s a").lines[1:]] == ["8", "7", "2"]
        usage = walk.type("tsck usage -s a")
        walk.follow_all(usage)
        assert "6" in walk.follow(applied, "undo").text
        walk.type("tsck policy apply -s a")

        # a quota refuses the save, and says what to do
        walk.type("tsck quota set 'runs/*' --refuse 100KB -s b")
        with tsck.open("b") as store:
            state = store.checkout("runs/bert")
            with pytest.raises(tsck.QuotaExceededError) as refused:
                store.put_snapshot(state, ref="runs/bert", step=3)
        walk.follow_all(walk.read(refused.value, "a job that is refused"), SIZE="1MB")
        walk.type("tsck quota remove 'runs/*' -s b")
        save("b", "runs/bert", 3)

        # one view of all stores
        walk.follow(walk.type("tsck catalog sync a b --db sqlite:///all.sqlite"), "find")
        found = walk.type("tsck find 'val_loss < 0.4' --db sqlite:///all.sqlite")
        assert "runs/gpt" in found.text
        assert "runs/bert" in found.text
        walk.follow(found, "catalog sync")
        close = walk.type("tsck find 'val_los < 0.4' --db sqlite:///all.sqlite", code=25)
        assert "did you mean val_loss?" in close.text

        with Browser(walk, chromium, "tsck ui --db sqlite:///all.sqlite") as browser:
            for name in ("a", "b"):
                browser.see(f"section.card:has(h2:text-is({str(tmp_path / name)!r})) table")
            browser.follow("Find")
            browser.write("Condition", "val_loss < 0.4")
            browser.see("#found tr:has-text('runs/bert')")
            browser.follow("runs/gpt")
            browser.see("[role=img][aria-label^='val_loss: '][aria-label*='lowest 0.3']")
            browser.follow("Draw over other runs")
            browser.write("Add a branch", "runs/bert")
            browser.see("[role=img][aria-label^='val_loss: '][aria-label*='runs/bert']")

        # a second copy, which serves when the first is gone
        walk.type("tsck copy a mirror")
        shutil.rmtree("a")
        assert "runs/gpt" in walk.type("tsck log -s mirror").text
        assert "no errors" in walk.type("tsck fsck --read-data -s mirror").text
        gone = walk.type("tsck log -s a", code=30)
        assert "there are stores at b mirror" in gone.text
        walk.follow(gone, "init")

        # ten lines for a report, and the same for a program
        report = walk.type("tsck doctor -s mirror").lines
        assert len(report) <= 12
        assert any(str(tmp_path / "mirror") in line for line in report)
        assert json.loads(walk.type("tsck usage --json -s mirror").text)["snapshots"] == 3
