"""Runs the same job twice, once killed several times and once undisturbed, and checks that both end bit-identical.

Treats the job as a black box in another process, and uses the store as any user would.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import tensorstore_ck as tsck
from examples.demo import page
from examples.demo.compare import differences
from examples.demo.supervisor import Life, Moment, run_job
from examples.demo.train import SIZES, Config

KILLED, UNDISTURBED = "runs/killed", "runs/undisturbed"


def run_story(folder: Path, *, size: str, kills: int, seed: int) -> int:
    """Runs the story in an empty folder and prints it; returns the exit code: 0 if the two runs are bit-identical."""
    begun = time.monotonic()
    config, stage = SIZES[size], Stage(folder, size)
    page.title(stage.url, config)
    with tsck.open(stage.url, create=True, cache_dir=folder / "cache" / "story", state_dir=folder / "state" / "story") as store:
        page.chapter(1, f"Train, with {kills} times kill -9 at random moments (seed {seed})")
        lives = list(stage.run_with_kills(store, plan_kills(config, kills, seed)))
        page.curve(_curve(lives), [life.last_step for life in lives if life.killed])

        page.chapter(2, "The same, undisturbed")
        undisturbed = stage.run_once(UNDISTURBED, None)
        page.life(1, undisturbed, f"done: {config.steps} steps")
        page.curve(_curve([undisturbed]), [])

        page.chapter(3, "Are both bit-identical?")
        same = [page.check(what, good, details) for what, good, details in compare(store, lives, undisturbed)]

    page.chapter(4, "The store, seen by its tools")
    page.command("export", f"TSCK_STORE={stage.url}")
    worked = [
        stage.run_tool("log", KILLED, "--limit", "4"),
        stage.run_tool("diff", f"{KILLED}~1", KILLED, max_lines=12),
        stage.run_tool("diff", UNDISTURBED, KILLED),
        stage.run_tool("usage"),
        stage.run_tool("fsck", "--read-data"),
    ]
    good = all(same) and all(worked)
    page.verdict(good=good, kills=sum(life.killed for life in lives), seconds=time.monotonic() - begun, url=stage.url)
    return 0 if good else 1


def plan_kills(config: Config, kills: int, seed: int) -> list[Moment]:
    """One moment in each of `kills` equal spans of the run, alternately in a save and in a step."""
    chance = random.Random(seed)  # noqa: S311
    moments = []
    for number in range(kills):
        step = 1 + int(config.steps * (number + chance.random()) / kills)
        if number % 2:
            moments.append(Moment(min(step, config.steps - 1), in_put=False, delay=chance.random()))
        else:
            put = min(-(-step // config.snapshot_every) * config.snapshot_every, config.steps)
            # The first kill comes at the save's first bytes, so that at least one save is cut in the middle.
            moments.append(Moment(put, in_put=True, delay=chance.uniform(0, 0.2) if number else 0.0))
    return moments


class Stage:
    """A folder with the store and this host's caches, and the programs that work on them."""

    def __init__(self, folder: Path, size: str) -> None:
        self.url = folder / "store"
        self._size = size
        self._environment = {
            **os.environ,
            "TSCK_STORE": str(self.url),
            "XDG_CACHE_HOME": str(folder / "cache"),  # leaves nothing outside of the folder
            "XDG_STATE_HOME": str(folder / "state"),
        }

    def run_once(self, ref: str, moment: Moment | None) -> Life:
        """Runs the job until it ends or is killed."""
        command = [sys.executable, "-m", "examples.demo.train", str(self.url), "--ref", ref, "--size", self._size]
        return run_job(command, self._environment, self.url, moment, page.progress)

    def run_with_kills(self, store: tsck.Store, moments: Sequence[Moment]) -> Iterator[Life]:
        """Starts the job, kills it at the next moment, and starts it again, until it completes."""
        left = list(moments)
        killed, cut, number = True, False, 0
        while killed:
            moment = left.pop(0) if left else None
            life = self.run_once(KILLED, moment)
            killed, number = life.killed, number + 1
            head = store.resolve(KILLED).step if KILLED in store.branches() else None
            page.life(number, life, _how_it_ended(life, head))
            cut = cut or is_cut(life, head)
            if moment is not None and moment.in_put and not cut:
                left.insert(0, Moment(moment.step + 1, in_put=True, delay=0.0))  # the save was faster than the kill: try the next save
            yield life

    def run_tool(self, *arguments: str, max_lines: int | None = None) -> bool:
        """Runs ``tsck`` and prints up to `max_lines` of its output; returns whether it succeeded."""
        page.command("tsck", *arguments)
        done = subprocess.run(
            [sys.executable, "-m", "tensorstore_ck.cli", *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        page.output(done.stdout, max_lines)
        return done.returncode == 0


def is_cut(life: Life, head: int | None) -> bool:
    """Whether it was killed during a save that was then not published."""
    return life.killed and life.putting is not None and life.putting != head


def _how_it_ended(life: Life, head: int | None) -> str:
    if not life.killed:
        return f"done: {life.last_step} steps"
    goes_on = f"resumes from step {head}" if head is not None else "starts over"
    if is_cut(life, head):
        return f"killed in the save of step {life.putting}, {page.size(life.unfinished_bytes)} of its pack written; {goes_on}"
    if life.putting is None:
        return f"killed in step {life.last_step + 1}; {goes_on}"
    return f"killed in the save of step {head}, just after it was published; {goes_on}"


def _curve(lives: Sequence[Life]) -> list[float]:
    losses = {step: loss for life in lives for step, loss in life.losses.items()}
    return [float.fromhex(losses[step]) for step in sorted(losses)]


def compare(store: tsck.Store, lives: Sequence[Life], undisturbed: Life) -> Iterator[tuple[str, bool, str]]:
    """Compares the output and the stored states of both runs; yields (what, whether they are identical, details)."""
    printed = [(step, loss) for life in lives for step, loss in life.losses.items()]
    wrong = sorted(
        {step for step, loss in printed if undisturbed.losses.get(step) != loss} | undisturbed.losses.keys() - dict(printed).keys()
    )
    again = len(printed) - len(undisturbed.losses)
    yield (
        "losses as printed",
        not wrong,
        f"differ at steps {wrong}" if wrong else f"{page.counted(len(printed), 'step')}, {again} of them repeated after a kill",
    )
    ours, theirs = lives[-1].fingerprint, undisturbed.fingerprint
    yield "state in memory", ours == theirs is not None, f"sha256 {str(ours)[:12]} and {str(theirs)[:12]}"
    our_roots, their_roots = ([snapshot.root for snapshot in store.log(ref)] for ref in (KILLED, UNDISTURBED))
    yield (
        "roots of snapshots",
        our_roots == their_roots,
        f"{page.counted(len(their_roots), 'snapshot')}, Merkle hash over content and history",
    )
    killed, alone = store.checkout(KILLED), store.checkout(UNDISTURBED)
    for key in alone | killed:
        wrong_paths = differences(killed.get(key), alone.get(key))
        yield f"restored {key}", not wrong_paths, ", ".join(wrong_paths[:3]) or page.contents(alone[key])
