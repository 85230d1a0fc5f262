"""On call at night: a pack in S3 has been damaged, a job cannot restore, and there is a copy of the store on a disk; a job stands still."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tests.end_to_end.walks.browser import Browser
from tests.end_to_end.walks.walk import Walk
from tests.integrations.importing.same import require_same
from tests.servers import BUCKET, KEY, SECRET, S3Server

JOB = """
import sys
import torch
import tensorstore_ck as tsck

with tsck.open(sys.argv[1], create=True) as store:
    step, state = 0, {"w": torch.zeros(50_000)}
    if "runs/gpt" in store.branches():
        state = store.checkout("runs/gpt")
        step = store.show("runs/gpt").snapshot.step
    print("from step", step)
    torch.manual_seed(step)
    for step in range(step + 1, step + 4):
        state["w"] = state["w"] + torch.randn(50_000)
        store.put_snapshot(state, ref="runs/gpt", step=step)
"""
JOBS = """
import torch
import tensorstore_ck as tsck

with tsck.open("ckpt", create=True) as store:
    model = {"w": torch.zeros(50_000), "frozen": torch.ones(50_000)}
    for step in range(1, 4):
        store.put_snapshot({"model": model, "n": step}, ref="runs/done", step=step)
    store.finish("runs/done")
    for step in range(1, 9):
        model["w"] = model["w"] + (100.0 if step == 8 else 0.1)
        store.put_snapshot({"model": model}, ref="runs/gpt", step=step, metrics={"loss": 9.0 if step == 8 else 1 / step})
"""
CORRUPT = 41
DAMAGED = 40


def damage_newest_pack(server: S3Server, url: str) -> str:
    """Flips bytes in the middle, with a client that shares nothing with what is tested; the pack's name in the store."""
    prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
    with contextlib.closing(server.client()) as client:
        found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}packs/")["Contents"]
        key = max((each["Key"] for each in found), key=lambda key: key.rsplit("/")[-1])
        data = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        middle = len(data) // 2
        data[middle : middle + 8] = bytes(byte ^ 0xFF for byte in data[middle : middle + 8])
        client.put_object(Bucket=BUCKET, Key=key, Body=bytes(data))
    return str(key).removeprefix(prefix)


@pytest.mark.s3
def test_a_damaged_pack(seaweedfs_server: S3Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Walk(tmp_path, monkeypatch) as walk:
        Path("job.py").write_text(JOB)
        assert walk.python("job.py", url).lines == ["from step 0"]
        walk.type("tsck init backup")
        walk.type(f"tsck copy {url} backup")
        with tsck.open(url, read_only=True) as store:
            expected = {step: store.checkout(f"runs/gpt@{step}") for step in (1, 2, 3)}
        name = damage_newest_pack(seaweedfs_server, url)

        failed = walk.python("job.py", url, code=1)
        assert name in failed.lines[-2]
        walk.follow(failed, "help corrupt_object")
        found = walk.follow(failed, "fsck --read-data", code=DAMAGED)
        assert name in found.text
        assert "hits runs/gpt@3" in found.text
        assert "no errors" not in found.text
        read = walk.type(f"tsck get runs/gpt out.pt -s {url}", code=CORRUPT)
        walk.follow(read, "fsck --read-data", code=DAMAGED)

        options = f"--storage-option endpoint_url={seaweedfs_server.endpoint} --storage-option key={KEY} --storage-option secret={SECRET}"
        read = walk.type(f"tsck get runs/gpt out.pt -s {url} {options}", code=CORRUPT)
        again = walk.follow(read, "fsck --read-data", code=DAMAGED, KEY=KEY, SECRET=SECRET)

        repaired = walk.follow(found, "fsck --read-data --repair --from", OTHER_STORE="backup")
        assert f"repaired  {name}" in repaired.text
        walk.follow(again, "fsck --read-data --repair --from", OTHER_STORE="backup", KEY=KEY, SECRET=SECRET)
        checked = walk.type(f"tsck fsck --read-data -s {url}")
        assert "no errors" in checked.lines
        assert "an interrupted save" not in checked.text, "the damaged pack was replaced by the repair"
        walk.follow_all(checked)
        kept = walk.type(f"tsck fsck --read-data -s {url}").text  # gc doubts a relocation for a day: see gc/released.py
        assert "no errors" in kept.splitlines()
        assert f"notice  {name}" in kept
        with tsck.open(url, read_only=True) as store:
            for step, state in expected.items():
                require_same(store.checkout(f"runs/gpt@{step}"), state)
        assert walk.python("job.py", url).lines == ["from step 3"]
        with tsck.open(url, read_only=True) as store:
            assert [snapshot.step for snapshot in store.log("runs/gpt")] == [6, 5, 4, 3, 2, 1]


@pytest.mark.slow
def test_a_job_that_stands_still(chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pages: which job it is, what its last save changed, and what the store lacks."""
    with Walk(tmp_path, monkeypatch) as walk:
        Path("jobs.py").write_text(JOBS)
        walk.python("jobs.py")
        walk.type("tsck init backup")
        walk.type("tsck copy ckpt backup")
        with Browser(walk, chromium, "tsck ui ckpt") as browser:
            browser.see("tr:has-text('runs/gpt') td.bad:has-text('late')")
            assert "finished" in browser.see("tr:has-text('runs/done')")
            assert "late" not in browser.see("tr:has-text('runs/done')")
            browser.follow("runs/gpt")
            browser.see("[role=img][aria-label^='loss: 8 values'][aria-label*='highest 9']")
            browser.press("Compare old and new")
            browser.see("#differences th:has-text('model.w')")
            assert "model.frozen" not in browser.see("#differences")
            newest = max((path for path in Path("ckpt/packs").rglob("*") if path.is_file()), key=lambda path: path.name)
            newest.unlink()
            browser.follow("Health")
            browser.press("Check")
            assert newest.name in browser.see("tr:has(.badge.bad)")
            repair = browser.commands("Repair")
        walk.follow(repair, "fsck --repair --from", OTHER_STORE="backup")
        assert walk.type("tsck fsck --read-data -s ckpt").lines[-1] == "no errors"
