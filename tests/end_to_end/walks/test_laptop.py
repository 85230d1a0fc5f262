"""A new user on a laptop, with one run: trains, looks, is killed in the middle of a save, cleans up, and looks at it in a notebook."""

import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tests import documents
from tests.end_to_end.walks.terminal import COLUMNS
from tests.end_to_end.walks.walk import Walk

pytestmark = pytest.mark.slow

SLOW_SAVE = """
import torch
import tensorstore_ck as tsck

with tsck.open("./ckpt", rate_limit=4_000_000) as store:
    store.checkout("runs/first")
    store.put_snapshot({"w": torch.randn(6_000_000)}, ref="runs/first", step=40)
"""
NO_STORE, NOT_FOUND, EXISTS, MARKED_BAD, GC_REFUSED = 30, 25, 28, 36, 37
LOOK_SECONDS = 0.02
SOME_BYTES = 1_000_000
COPIED_BYTES = 40_000_000
INTERRUPTED = 130
COPYING = re.compile(r"^copying .* [1-9]\d?% \S+ MiB of \S+ MiB, \S+ [KM]iB/s \d:\d\d:\d\d$", re.MULTILINE)
BOLD = "\x1b[1m"


def write_script() -> None:
    """The script of docs/quickstart.md, shorter: 3 epochs of 10 steps."""
    block = documents.script("train.py")
    for long, short in (("4000", "400"), ("cursor.epoch < 5", "cursor.epoch < 3"), ("step % 50", "step % 10")):
        assert long in block
        block = block.replace(long, short)
    Path("train.py").write_text(block)


def kill_while_it_saves() -> None:
    """kill -9 once a part of the save is in the store, and the record of the process that writes it."""
    before = bytes_in("ckpt")
    with subprocess.Popen([sys.executable, "-c", SLOW_SAVE]) as process:
        while not (any(Path("ckpt/writers").glob("*")) and bytes_in("ckpt") - before > SOME_BYTES):
            with suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"it ended with {process.wait(LOOK_SECONDS)} before it could be killed")
        process.kill()


def bytes_in(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def copy_to_another_disk(walk: Walk) -> None:
    """It shows how far it is, on one line, until Ctrl-C ends it; the same line again finishes it."""
    with tsck.open("./ckpt") as store:
        store.put_snapshot({"w": torch.randn(COPIED_BYTES // 4)}, ref="runs/large", step=1)
    walk.type("tsck init usb")
    line = "tsck copy ckpt usb --ref runs/large"
    walk.terminal.begin(f"{line} --rate-limit 2MB")
    walk.terminal.until(lambda: COPYING.search(walk.terminal.screen()))
    assert len(COPYING.findall(walk.terminal.screen())) == 1
    walk.terminal.press("C-c")
    stopped = walk.read_on(line, code=INTERRUPTED)
    assert "copying" not in stopped.text, "the bar goes with the command"
    assert "Traceback" not in stopped.text
    assert "runs/large" in walk.type(line).text
    assert "no errors" in walk.type("tsck fsck --read-data -s usb").lines


def complete_and_colour(walk: Walk) -> None:
    """Tab in the shell after the printed line; colours, and none where the user wants none."""
    installed = walk.type("tsck completion bash --install")
    (script,) = re.findall(r"`(source [^`]+)`", installed.text)
    walk.type(script)
    walk.terminal.complete("tsck lo", "tsck log")
    walk.terminal.complete("tsck log -s ckpt runs/f", "tsck log -s ckpt runs/first")
    walk.terminal.complete("tsck show -s ckpt runs/first@2", "tsck show -s ckpt runs/first@20")
    walk.type("tsck log runs/first -s ckpt")
    assert BOLD in walk.terminal.screen(colours=True)
    walk.type("NO_COLOR=1 tsck log runs/first -s ckpt")
    assert BOLD not in walk.terminal.screen(colours=True).rpartition("NO_COLOR=1")[2]


def test_before_there_is_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with Walk(tmp_path, monkeypatch) as walk:
        walk.type("tsck log", code=NO_STORE)
        walk.follow(walk.type("tsck log -s ckpt", code=NO_STORE), "init")
        nothing = walk.type("tsck log -s ckpt")
        walk.type("tsck usage -s ckpt")
        walk.follow(walk.type("tsck policy -s ckpt"), "policy set")
        walk.follow(walk.type("tsck branch -s ckpt"), "put", FILE="model.pt", NAME="runs/x")
        walk.follow(nothing, "put", FILE="model.pt", NAME="runs/y")
        walk.follow(walk.type("tsck tag -s ckpt"), "tag", NAME="paper", ADDRESS="runs/x")
        walk.follow(walk.type("tsck pin -s ckpt"), "pin", ADDRESS="runs/x")
        walk.follow(walk.type("tsck tier -s ckpt"), "policy set")
        walk.follow(walk.type("tsck policy apply --dry-run -s ckpt"), "gc")
        walk.type("tsck log runs/x -s ckpt")


def test_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Walk(tmp_path, monkeypatch) as walk:
        write_script()
        assert [line.split()[1] for line in walk.python("train.py").lines] == ["10", "20", "30"]
        again = walk.python("train.py")
        assert again.lines == []
        assert again.text.count("resuming from runs/first@30") == 1

        log = walk.type("tsck log runs/first -s ckpt")
        assert [line.split()[1] for line in log.lines[1:]] == ["30", "20", "10"]
        assert max(map(len, log.lines)) <= COLUMNS
        size, grown = re.search(r"^size +(\S+ \S+), .*grow by (\S+ \S+)$", walk.type("tsck show runs/first -s ckpt").text, re.M).groups()  # type: ignore[union-attr]
        assert size in log.text
        assert grown in log.text
        assert "tensors" in walk.type("tsck diff runs/first~1 runs/first -s ckpt").text
        assert "gc can free: nothing now" in walk.type("tsck usage -s ckpt").text
        assert walk.type("tsck fsck --read-data -s ckpt").lines[-1] == "no errors"
        assert "would be freed: 0 B" in walk.type("tsck gc --dry-run -s ckpt").text

        # a save is killed: what it left is free at once, by the command that each of them prints
        whole = bytes_in("ckpt")
        kill_while_it_saves()
        left = bytes_in("ckpt") - whole
        assert left > SOME_BYTES
        usage = walk.type("tsck usage -s ckpt")
        (freed,) = re.findall(r"gc can free: (\S+ \S+) now", usage.text)
        dry = walk.type("tsck gc --dry-run -s ckpt")
        assert f"would be freed: {freed}" in dry.text
        assert f"gc can free: {freed} now" in walk.type("tsck fsck -s ckpt").text
        refused = walk.type("tsck gc -s ckpt", code=GC_REFUSED)
        assert refused.printed == usage.printed == dry.printed
        assert f"freed: {freed}" in walk.follow(refused, "gc --max-delete 100%").text
        assert bytes_in("ckpt") < whole + 10_000
        clean = walk.type("tsck usage -s ckpt")
        assert "gc can free: nothing now" in clean.text
        shutil.rmtree("cache")
        assert walk.type("tsck log runs/first -s ckpt").text == log.text

        # a notebook
        with tsck.open("./ckpt", read_only=True) as store:
            state = store.checkout("runs/first")
            with pytest.raises(tsck.StoreError) as refusal:
                store.put_snapshot(state, ref="runs/first", step=1)  # type: ignore[attr-defined]
            walk.read(refusal.value, "a notebook that only looks")
        with tsck.open("./ckpt") as store:
            state = store.checkout("runs/first")
            with pytest.raises(tsck.InvalidOptionError) as lower:
                store.put_snapshot(state, ref="runs/first", step=1)
            made = walk.follow(walk.read(lower.value, "a notebook that puts"), "branch")
            (branch,) = re.findall(r"^branch (\S+) is at", made.text)
            store.checkout(branch)
            store.put_snapshot({"w": torch.ones(3)}, ref=branch, step=31)
            store.put_snapshot({"w": torch.ones(3)}, ref="notebook", step=1)
        assert walk.type("tsck log runs/first -s ckpt").text == log.text

        # two at once: the one that lost goes on as the error says
        with tsck.open("./ckpt") as job, tsck.open("./ckpt") as other:
            job.checkout("runs/first")
            other.checkout("runs/first")
            other.put_snapshot({"w": torch.ones(4)}, ref="runs/first", step=31)
            with pytest.raises(tsck.ConflictError) as lost:
                job.put_snapshot({"w": torch.zeros(4)}, ref="runs/first", step=32)
            said = walk.read(lost.value, "the job that lost")
            walk.follow(said, "branch")
            walk.follow(said, "reset")
            job.put_snapshot({"w": torch.zeros(4)}, ref="runs/first", step=32)

        copy_to_another_disk(walk)
        complete_and_colour(walk)

        # a bad step, a name, and back
        walk.type("tsck mark runs/first bad --reason 'loss spike' -s ckpt")
        bad = walk.type("tsck get runs/first out.pt -s ckpt", code=MARKED_BAD)
        walk.follow_all(bad)
        walk.type("tsck mark runs/first --clear -s ckpt")
        walk.type("tsck tag paper runs/first@30 -s ckpt")
        taken = walk.type("tsck tag paper runs/first@20 -s ckpt", code=EXISTS)
        walk.follow_all(taken)
        head = walk.type("tsck forget runs/first -s ckpt")
        assert "32" in head.text
        gone = walk.type("tsck log runs/first -s ckpt", code=NOT_FOUND)
        later = walk.type("tsck usage -s ckpt")
        assert "undo window" in later.text
        walk.follow(later, "forget")
        walk.follow(gone, "undo")
        assert "32" in walk.type("tsck log runs/first -s ckpt").text
        walk.type("tsck forget runs/first -s ckpt")
        walk.follow(head, "undo")
        walk.follow(head, "gc")
        assert "32" in walk.type("tsck log runs/first -s ckpt").text
        walk.type("tsck export paper --to torch out.pt -s ckpt")
        walk.type("tsck export paper --to safetensors out -s ckpt")
        loaded = torch.load("out.pt", weights_only=True)
        assert torch.equal(loaded["model"]["0.weight"], state["model"]["0.weight"])
        walk.follow_all(later)
        walk.follow_all(clean)  # which snapshot it would forget to have more space
        assert walk.type("tsck fsck --read-data -s ckpt").lines[-1] == "no errors"
