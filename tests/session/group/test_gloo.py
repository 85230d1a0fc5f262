"""Eight real processes over gloo save together, and one of them is killed or stopped at each point of the protocol.

Nothing of the save becomes visible, or all others return the same root; they go on as a new group at once, without cleaning up; and what
was left behind is gc's. A rank that was stopped and goes on long after learns what the others know, and harms nothing.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.gc import GcOptions
from tests.effort import PATIENCE_SECONDS
from tests.servers import S3Server
from tests.session.group.gloo_worker import GRACE_SECONDS, POINTS, RANKS, Nursery, Play, full_tensors, heard

TIMEOUT_SECONDS = 3.0
SLACK_SECONDS = PATIENCE_SECONDS
"""For a machine that has other things to do."""
LIFE_SECONDS = 2 * PATIENCE_SECONDS
EVERYTHING = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1)
OF_RANK_0 = {
    "before go",
    "after go",
    "before commit",
    "before the record",
    "after the record",
    "before the log entry",
    "after the log entry",
}
OF_RANK_0 |= {"before outcome", "after outcome"}
PUBLISHED = {"after the log entry", "before outcome", "after outcome"}
"""Where rank 0 has published: all others say so."""
OF_OTHERS = {"before proposal", "after proposal", "before result", "after result"}
VICTIM = 3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIFE_SECONDS)]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), *sys.path])),
        "RES_OPTIONS": "timeout:1 attempts:1",  # torch's store asks for the name of every client, and here nobody may answer
    }
    command = [sys.executable, "-m", "tests.session.group.gloo_worker"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Nursery(process.stdin, process.stdout)
        finally:
            process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0


def perform(nursery: Nursery, play: Play) -> None:
    """Until all ranks have ended; a stopped one goes on when all others have ended."""
    Path(play.folder).mkdir()
    tsck.open(play.url, create=True, storage_options=play.storage_options, cache_dir=f"{play.folder}/cache").close()
    *ranks, agent = nursery.play(play)
    try:
        victim = ranks[play.victim]
        codes = wait(nursery, [pid for pid in ranks if pid != victim])
        assert set(codes) == {0}, errors(play)
        if play.signal == signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
        (code,) = wait(nursery, [victim])
        assert code == (-signal.SIGKILL if play.signal == signal.SIGKILL else 0), errors(play)
        assert heard(play.folder, "struck"), "nothing happened to it"
    finally:
        os.kill(agent, signal.SIGKILL)
        wait(nursery, [agent])


def wait(nursery: Nursery, pids: list[int]) -> list[int]:
    codes: dict[int, int | None] = dict.fromkeys(pids)
    deadline = time.monotonic() + LIFE_SECONDS
    while None in codes.values():
        assert time.monotonic() < deadline, "a rank hangs"
        time.sleep(0.02)
        codes |= {pid: nursery.exit_code(pid) for pid, code in codes.items() if code is None}
    return [code for code in codes.values() if code is not None]


def errors(play: Play) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(Path(play.folder).glob("*.err")) if path.stat().st_size)


def said(play: Play, step: int) -> dict[int, dict[str, Any]]:
    """Rank -> how its save of a step ended."""
    lines = {rank: [line for line in heard(play.folder, f"rank-{rank}") if line["step"] == step] for rank in range(RANKS)}
    return {rank: found[0] for rank, found in lines.items() if found}


def require_one_outcome(play: Play) -> bool:
    """Whether the second save was published."""
    survivors = set(range(RANKS)) - {play.victim}
    for step in (1, 3):
        endings = said(play, step)
        assert set(endings) == (set(range(RANKS)) if step == 1 else survivors)
        assert len({ending.get("root") for ending in endings.values()}) == 1, endings
        assert None not in {ending.get("root") for ending in endings.values()}, endings
    endings = said(play, 2)
    assert survivors <= set(endings)
    for ending in endings.values():
        assert "root" in ending or ending["error"] == "SnapshotAbortedError", ending
    assert len({ending.get("root") for ending in endings.values()}) == 1, endings
    for rank in survivors:
        assert endings[rank]["seconds"] < endings[0 if 0 in endings else rank]["timeout"] + 2 * GRACE_SECONDS + SLACK_SECONDS
    return "root" in endings[min(survivors)]


def require_sound(play: Play, *, published: bool) -> None:
    """What is visible is right, also the older snapshots; and gc frees all that is left behind."""
    with tsck.open(play.url, storage_options=play.storage_options, cache_dir=f"{play.folder}/cache") as store:
        assert [snapshot.step for snapshot in store.log("job")] == ([2, 1] if published else [1])
        assert [snapshot.step for snapshot in store.log("again")] == [3]
        store.gc(EVERYTHING)
        assert not any(store.gc(EVERYTHING, dry_run=True).deleted.values())
        for snapshot in store.log():
            assert snapshot.step is not None
            restored = store.checkout(snapshot.root)
            assert restored["step"] == snapshot.step
            assert torch.equal(restored["replicated"], torch.full((3000,), float(snapshot.step)))
            for name, full in full_tensors(snapshot.step).items():
                assert torch.equal(restored["model"][name], full), (snapshot.step, name)
            ranks = RANKS - (snapshot.step == 3)
            for rank in range(ranks):
                assert store.rank_state(snapshot.root, rank)["rng"].tolist() == [snapshot.step, rank]
        report = store.fsck(read_data=True)
        assert report.ok, report.findings


def require(nursery: Nursery, play: Play) -> None:
    """Plays it, and looks at what came of it."""
    perform(nursery, play)
    published = require_one_outcome(play)
    if play.point in PUBLISHED or (play.point == "after result" and not play.url.startswith("s3:")):
        assert published
    elif play.point != "after result":
        assert not published
        if play.victim:
            assert all(f"rank {play.victim}" in ending["message"] for rank, ending in said(play, 2).items() if rank != play.victim)
    require_sound(play, published=published)


def together(nursery: Nursery, plays: list[Play]) -> None:
    """All at the same time, since ranks that wait for a deadline leave the processors to others."""
    with ThreadPoolExecutor(len(plays)) as pool:
        for performed in [pool.submit(require, nursery, play) for play in plays]:
            performed.result()


def variants(point: str) -> list[tuple[int, int, str]]:
    """Who is struck, by which signal, and who serves the store of the process group."""
    found: list[tuple[int, int, str]] = []
    if point not in OF_RANK_0:
        found += [(VICTIM, signal.SIGKILL, "agent"), (VICTIM, signal.SIGSTOP, "agent")]
    if point not in OF_OTHERS:
        found += [(0, signal.SIGKILL, "rank 0"), (0, signal.SIGSTOP, "agent")]
    if point in {"after the log entry", "in packs"}:
        found += [(0, signal.SIGKILL, "agent"), (0, signal.SIGSTOP, "rank 0")]
    return found


@pytest.mark.parametrize("point", POINTS)
def test_local_files(nursery: Nursery, tmp_path: Path, point: str) -> None:
    together(
        nursery,
        [
            Play(point, victim, strike, server, f"{tmp_path}/store-{n}", {}, f"{tmp_path}/play-{n}", TIMEOUT_SECONDS)
            for n, (victim, strike, server) in enumerate(variants(point))
        ],
    )


def test_a_rank_that_is_gone_before_its_save_is_noticed_long_before_the_deadline(nursery: Nursery, tmp_path: Path) -> None:
    """Nothing but its silence can end the second save within the test's time."""
    plays = [
        Play("before its put", victim, strike, "agent", f"{tmp_path}/store-{n}", {}, f"{tmp_path}/play-{n}", 600.0, 6.0)
        for n, (victim, strike) in enumerate(product((0, VICTIM), (signal.SIGKILL, signal.SIGSTOP)))
    ]
    together(nursery, plays)
    for play in plays:
        for rank, ending in said(play, 2).items():
            assert f"rank {play.victim} has not been heard of for" in ending["message"] or rank == play.victim == 0


@pytest.mark.s3
def test_seaweedfs(nursery: Nursery, seaweedfs_server: S3Server, tmp_path: Path) -> None:
    scenes = [
        ("in packs", VICTIM, signal.SIGKILL),
        ("after its part", VICTIM, signal.SIGSTOP),
        ("after the log entry", 0, signal.SIGKILL),
        ("before commit", 0, signal.SIGSTOP),
    ]
    urls = [f"{seaweedfs_server.url}/{uuid.uuid4()}" for _ in scenes]
    options = seaweedfs_server.storage_options
    together(
        nursery,
        [
            Play(*scene, "agent", url, options, f"{tmp_path}/play-{n}", TIMEOUT_SECONDS)
            for n, (scene, url) in enumerate(zip(scenes, urls, strict=True))
        ],
    )
