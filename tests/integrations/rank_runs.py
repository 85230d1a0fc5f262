"""Jobs of several ranks under torchrun, of which one can be killed with -9."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.effort import effort
from tests.end_to_end.scripts.launch import launched, torchrun

Said = dict[str, Any]


def run_ranks(
    job: str, folder: Path, *arguments: str, ranks: int = 2, kill: tuple[int, int] | None = None, fails: bool = False
) -> list[Said]:
    """What the ranks said; `kill`: a rank, and the step after which it is killed; `fails`: the job kills a rank itself."""
    folder.mkdir(exist_ok=True)
    said = []
    with launched(torchrun(ranks, "-m", job, str(folder), *arguments), folder, seconds=400.0) as program:
        for line in program.lines():
            _, begin, rest = line.partition('{"rank"')  # it may follow what another rank has printed without a line's end yet
            if not begin:
                continue
            said.append(json.loads(begin + rest))
            if kill is not None and (said[-1]["rank"], said[-1].get("step")) == kill:
                os.kill(said[-1]["pid"], signal.SIGKILL)
        code, _ = program.end()
        assert (code != 0) == (fails or kill is not None), program.errors()
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
    """In one write, since the ranks share the pipe."""
    os.write(1, (json.dumps({"rank": int(os.environ["RANK"]), **said}) + "\n").encode())
