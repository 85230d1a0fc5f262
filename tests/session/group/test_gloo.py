"""Eight real processes over gloo save together, and one of them is killed or stopped at each point of the protocol.

Nothing of the save becomes visible, or all others return the same root; they go on as a new group at once, without cleaning up; and what
was left behind is gc's. A rank that was stopped and goes on long after learns what the others know, and harms nothing.
"""

import os
import re
import signal
import uuid
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
from tests.session.group.gloo_worker import GRACE_SECONDS, POINTS, RANKS, Play, be_agent, full_tensors, heard, live
from tests.session.group.pool import rank_process

TIMEOUT_SECONDS = 3.0
SLACK_SECONDS = PATIENCE_SECONDS
"""For a machine that has other things to do."""
LIFE_SECONDS = 2 * PATIENCE_SECONDS
EVERYTHING = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1)
OF_RANK_0 = {"before go", "before commit", "after the record", "after the log entry", "before outcome"}
PUBLISHED = {"after the log entry", "before outcome"}
"""Where rank 0 has published: all others say so."""
OF_OTHERS = {"after proposal", "after result"}
VICTIM = 3

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.timeout(3 * LIFE_SECONDS)]


def perform(play: Play) -> None:
    """Until all ranks have ended; a stopped one goes on when all others have ended."""
    Path(play.folder).mkdir()
    tsck.open(play.url, create=True, storage_options=play.storage_options, cache_dir=f"{play.folder}/cache").close()
    agent = rank_process(be_agent, play.folder)
    ranks = [rank_process(live, play, rank) for rank in range(RANKS)]
    try:
        for process in (agent, *ranks):
            process.start()
        victim = ranks[play.victim]
        for process in ranks:
            if process is not victim:
                process.join(LIFE_SECONDS)
                assert process.exitcode == 0, errors(play)
        if play.signal == signal.SIGSTOP:
            os.kill(victim.pid or 0, signal.SIGCONT)
        victim.join(LIFE_SECONDS)
        assert victim.exitcode == (-signal.SIGKILL if play.signal == signal.SIGKILL else 0), errors(play)
        assert heard(play.folder, "struck"), "nothing happened to it"
    finally:
        for process in (agent, *ranks):
            if process.pid:
                process.kill()


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


def named(message: str) -> set[int]:
    """The ranks that a message names: the one that was struck, and on a busy machine others that were late."""
    runs = [run.split("-") for found in re.findall(r"\branks? (\d[\d, -]*)", message) for run in found.strip(", -").split(", ")]
    return {rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)}


def require(play: Play) -> None:
    """Plays it, and looks at what came of it."""
    perform(play)
    published = require_one_outcome(play)
    if play.point in PUBLISHED or (play.point == "after result" and not play.url.startswith("s3:")):
        assert published
    elif play.point != "after result":
        assert not published
        if play.victim:
            assert all(play.victim in named(ending["message"]) for rank, ending in said(play, 2).items() if rank != play.victim), said(
                play, 2
            )
    require_sound(play, published=published)


def together(plays: list[Play]) -> None:
    """All at the same time, since ranks that wait for a deadline leave the processors to others."""
    with ThreadPoolExecutor(len(plays)) as pool:
        for performed in [pool.submit(require, play) for play in plays]:
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
def test_local_files(tmp_path: Path, point: str) -> None:
    together(
        [
            Play(point, victim, strike, server, f"{tmp_path}/store-{n}", {}, f"{tmp_path}/play-{n}", TIMEOUT_SECONDS)
            for n, (victim, strike, server) in enumerate(variants(point))
        ],
    )


def test_a_rank_that_is_gone_before_its_save_is_noticed_long_before_the_deadline(tmp_path: Path) -> None:
    """Nothing but its silence can end the second save within the test's time."""
    plays = [
        Play("before its put", victim, strike, "agent", f"{tmp_path}/store-{n}", {}, f"{tmp_path}/play-{n}", 600.0, 6.0)
        for n, (victim, strike) in enumerate(product((0, VICTIM), (signal.SIGKILL, signal.SIGSTOP)))
    ]
    together(plays)
    for play in plays:
        for rank, ending in said(play, 2).items():
            assert f"rank {play.victim} has not been heard of for" in ending["message"] or rank == play.victim == 0


@pytest.mark.s3
def test_seaweedfs(seaweedfs_server: S3Server, tmp_path: Path) -> None:
    scenes = [
        ("in packs", VICTIM, signal.SIGKILL),
        ("after its part", VICTIM, signal.SIGSTOP),
        ("after the log entry", 0, signal.SIGKILL),
        ("before commit", 0, signal.SIGSTOP),
    ]
    urls = [f"{seaweedfs_server.url}/{uuid.uuid4()}" for _ in scenes]
    options = seaweedfs_server.storage_options
    together(
        [
            Play(*scene, "agent", url, options, f"{tmp_path}/play-{n}", TIMEOUT_SECONDS)
            for n, (scene, url) in enumerate(zip(scenes, urls, strict=True))
        ],
    )
