"""A job of 4 ranks is killed at random, and torchrun starts it again: it ends with the same bits as one that was never stopped.

Its last snapshot is then restored on other numbers of ranks and other meshes, with the same tensors.
"""

import math
import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tensorstore_ck as tsck
from examples.demo.compare import differences
from tensorstore_ck.training import EnvironmentChangedWarning
from tests.effort import effort
from tests.end_to_end.scripts.job import EVERY, REF, Job, captured
from tests.end_to_end.scripts.launch import Program, launched, torchrun
from tests.session.group.pool import GROUPS, RANKS, Pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANKS_OF_JOB = 4
SECONDS_PER_LIFE = 240.0
DELAYS = {"pid": 4.0, "step": 0.05, "putting": 0.1, "put": 0.01}
"""What a rank says -> how long it may live on. It says its pid before it imports torch, the others before or after what they name."""

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else torch gives all lives the same store, and ranks look for those of the life before (torch 2.13; pytorch/pytorch#135712)."""


class Moment(NamedTuple):
    """When a rank is killed."""

    rank: int
    said: str
    at_step: int
    delay: float


@dataclass
class Run:
    """What the ranks said, over all their lives."""

    losses: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    """(rank, step) -> one loss, however often the step was made."""
    own: dict[int, str] = field(default_factory=dict)
    """Rank -> hash of its generators and of what it would draw next, at the end."""
    lives: int = 0
    resumed: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """Who was killed, and what it had said last."""
    _last: dict[int, str] = field(default_factory=dict)
    _pids: dict[int, int] = field(default_factory=dict)
    _struck: int | None = None

    def hear(self, line: str) -> None:
        """A line: of which rank, and what it says."""
        who, _, said = line.strip().partition(" ")
        rank = int(who)
        match said.split():
            case ["pid", pid]:
                self._pids[rank] = int(pid)
                self.lives += rank == 0
                if rank == self._struck:
                    self.ends.append(f"rank {rank} after {self._last[rank]!r}")
            case ["resumed", step] if rank == 0:
                self.resumed.append(int(step))
            case ["step", step, loss]:
                self.losses.setdefault((rank, int(step)), set()).add(loss)
            case ["own", digest]:
                self.own[rank] = digest
        self._last[rank] = " ".join(said.split()[:2])

    def strike(self, moment: Moment) -> bool:
        """Kills a rank, if all ranks have begun this life, and its moment has come."""
        said, number = self._last.get(moment.rank, "nothing 0").split()
        if len(self._pids) < RANKS_OF_JOB or said != moment.said or (said != "pid" and int(number) < moment.at_step):
            return False
        time.sleep(moment.delay)  # anywhere in what it does next
        os.kill(self._pids[moment.rank], signal.SIGKILL)
        self._struck = moment.rank
        self._pids.clear()
        return True


def plan(kills: int, seed: int) -> list[Moment]:
    """The first in the second save or later, the others anywhere but in the last steps: a life may save one snapshot more than planned."""
    drawn = random.Random(seed)
    moments = []
    for number in range(kills):
        said = "putting" if number == 0 else drawn.choice(list(DELAYS))
        at_step = drawn.randrange(EVERY + 1, steps_for(kills) - EVERY * (kills + 1))
        moments.append(Moment(drawn.randrange(RANKS_OF_JOB), said, at_step, drawn.uniform(0, DELAYS[said])))
    return moments


def steps_for(kills: int) -> int:
    return EVERY * (6 + kills)


def listen(program: Program, moments: Iterator[Moment]) -> Run:
    """Hears a job to its end, and kills ranks."""
    run = Run()
    moment = next(moments, None)
    for line in program.lines():
        run.hear(line)
        if moment is not None and run.strike(moment):
            moment = next(moments, None)
    assert moment is None, "it ended before all its kills"
    return run


def run_job(folder: Path, steps: int, moments: list[Moment]) -> Run:
    folder.mkdir()
    command = torchrun(RANKS_OF_JOB, "-m", "tests.end_to_end.scripts.job", str(folder), str(steps), restarts=20)
    with launched(command, folder, SECONDS_PER_LIFE * (1 + len(moments)), **OWN_STORE) as job:
        run = listen(job, iter(moments))
        code, _ = job.end()
        assert code == 0, job.errors()
    return run


def restored(folder: str, shape: tuple[int, int]) -> float | None:
    """On a rank: writes all that the ranks of this mesh restore, in full, and makes a step."""
    ranks = math.prod(shape)
    mesh = DeviceMesh("cpu", torch.arange(ranks).view(shape), mesh_dim_names=("dp", "tp"))  # all ranks must make it
    if dist.get_rank() >= ranks:
        return None
    job = Job(mesh)
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache") as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", EnvironmentChangedWarning)
        job.resume(store, REF, GROUPS[ranks])
    state = captured(job)
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/on {ranks}.pt")
    return job.step()


def test_killed_at_random_it_ends_with_the_same_bits(tmp_path: Path, pool: Pool, pytestconfig: pytest.Config) -> None:
    kills = pytestconfig.getoption("--kills", effort(1, 2))
    steps = steps_for(kills)
    expected = run_job(tmp_path / "undisturbed", steps, [])
    found = run_job(tmp_path / "killed", steps, plan(kills, pytestconfig.getoption("--seed", 1)))
    print(f"killed: {'; '.join(found.ends)}; went on from steps {found.resumed}")
    assert (found.lives, len(found.ends)) == (kills + 1, kills)
    assert found.resumed[-1] > 0
    assert (found.losses, found.own) == (expected.losses, expected.own)
    assert all(len(losses) == 1 for losses in found.losses.values())
    assert len(found.losses) == RANKS_OF_JOB * steps

    ends = [torch.load(tmp_path / name / "end.pt") for name in ("undisturbed", "killed")]
    assert differences(*ends) == []
    stores = [tsck.open(tmp_path / name / "store", cache_dir=tmp_path / "cold") for name in ("undisturbed", "killed")]
    with stores[0], stores[1]:
        histories = [[(snapshot.step, snapshot.root) for snapshot in store.log(REF)] for store in stores]
        assert [step for step, _ in histories[1]] == list(range(steps, 0, -EVERY))
        assert histories[0] == histories[1]
        for _, root in histories[1]:
            assert differences(*(store.checkout(root) for store in stores)) == []
            for rank in range(RANKS_OF_JOB):
                assert differences(*(store.rank_state(root, rank) for store in stores)) == []
        report = stores[1].fsck(read_data=True)
        assert report.ok, report.findings

    for shape in ((2, 1), (2, 4)):
        losses = pool.run(restored, str(tmp_path / "killed"), shape)
        ranks = math.prod(shape)
        assert len(set(losses[:ranks])) == 1
        assert losses[ranks:] == [None] * (RANKS - ranks)
        assert differences(ends[1], torch.load(tmp_path / "killed" / f"on {ranks}.pt")) == []
