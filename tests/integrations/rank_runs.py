"""Jobs of several ranks, as under torchrun, of which one can be killed with -9."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.effort import effort
from tests.end_to_end.scripts.launch import REPOSITORY

Said = dict[str, Any]

SECONDS = 400.0
"""After which a job is killed."""


class _Server:
    """The process that forks the ranks of jobs of one package; it ends with this one."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.rank_server"],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
                "OMP_NUM_THREADS": "1",  # as torchrun says, too
                "RES_OPTIONS": "timeout:1 attempts:1",  # torch's store asks for the name of every client, and here nobody may answer
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def lines(self, **asked: object) -> Iterator[str]:
        """What the ranks of a job print, until they have ended; then what the server says of them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        watch = threading.Timer(SECONDS, self._process.terminate)
        watch.start()
        for line in self._process.stdout:
            yield line
            if line.startswith('{"codes"'):
                watch.cancel()
                return
        self._errors.seek(0)
        raise AssertionError(f"the server of the ranks has ended:\n{self._errors.read()}")

    def end(self) -> None:
        """With a job that it may have."""
        with self._errors, self._process:
            self._process.terminate()


_SERVERS: dict[str, _Server] = {}
"""By package; one at a time, since it has all that the package imports in memory."""


def _server_of(job: str) -> _Server:
    package, _, _ = job.rpartition(".")
    if package not in _SERVERS:
        while _SERVERS:
            _SERVERS.popitem()[1].end()
        _SERVERS[package] = _Server()
    return _SERVERS[package]


def run_ranks(
    job: str, folder: Path, *arguments: str, ranks: int = 2, kill: tuple[int, int] | None = None, fails: bool = False
) -> list[Said]:
    """What the ranks said; `kill`: a rank, and the step at which it is killed when it has said so; `fails`: the job kills a rank itself."""
    folder.mkdir(exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TESTS_KILL": json.dumps(kill),
    }
    asked = {"job": job, "folder": str(folder), "arguments": [str(folder), *arguments], "environment": environment, "ranks": ranks}
    said, codes, server = [], [], _server_of(job)
    try:
        for line in server.lines(**asked):
            _, begin, rest = line.partition('{"rank"')  # it may follow what another rank has printed without a line's end yet
            if begin:
                said.append(json.loads(begin + rest))
            elif line.startswith('{"codes"'):
                codes = json.loads(line)["codes"]
    except BaseException:
        _SERVERS.clear()
        server.end()
        raise
    assert any(codes) == (fails or kill is not None), (codes, (folder / "stderr.log").read_text())
    return said


def ends(said: list[Said], key: str = "losses") -> list[Said]:
    """What the ranks said at the end, which has `key`, in their order."""
    return sorted((each for each in said if key in each), key=lambda each: int(each["rank"]))


def check_kills(job: str, folder: Path, option: str, key: str, saved_after: set[int]) -> None:
    """Kills each of two ranks at calls of the backend in a save, and checks that the resumed job says what an undisturbed one does.

    `key`: under which a rank says number by step at the end; `saved_after`: the first step after each save, of which the job resumes one.
    """
    whole = ends(run_ranks(job, folder / "whole", option), key)
    calls = [each["calls"] for each in whole]
    assert min(calls) > 3
    every = [(rank, at, torn) for rank in (0, 1) for at in range(1, calls[rank] + 1) for torn in (0, 1)]
    seen = set()
    for rank, at, torn in effort([(0, 1, 0), (1, calls[1] - 1, 1), (0, calls[0], 1)], every):
        killed = folder / f"killed-{rank}-{at}-{torn}"
        run_ranks(job, killed, option, str(rank), str(at), str(torn), fails=True)
        resumed = ends(run_ranks(job, killed, option), key)
        first = min(int(step) for step in resumed[0][key])
        expected = [{step: number for step, number in each[key].items() if int(step) >= first} for each in whole]
        assert [each[key] for each in resumed] == expected, (rank, at, torn)
        seen.add(first)
    assert min(saved_after) in seen
    assert seen <= saved_after


def say(**said: object) -> None:
    """In one write, since the ranks share the pipe; what the test would kill then ends here, before it does more."""
    rank = int(os.environ["RANK"])
    os.write(1, (json.dumps({"rank": rank, **said}) + "\n").encode())
    if [rank, said.get("step")] == json.loads(os.environ.get("TESTS_KILL", "null")):
        os.kill(os.getpid(), signal.SIGKILL)
