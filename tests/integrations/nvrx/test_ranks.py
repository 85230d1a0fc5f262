"""Two ranks keep local checkpoints, each on a disk of its own: alone and replicated, with disks that are lost or damaged, and killed."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvidia_resiliency_ext", reason="NVRx is not installed: run `make test-apart`")
pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")

from tests.effort import effort
from tests.integrations.rank_runs import Said, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

JOB = "tests.integrations.nvrx.local_job"


def run(folder: Path, copies: int, *commands: str, fails: bool = False) -> list[list[Said]]:
    """What both ranks said of each command."""
    said: dict[tuple[int, int], Said] = {}
    for each in run_ranks(JOB, folder, str(copies), *commands, fails=fails):
        number = sum(rank == each["rank"] for _, rank in said)
        said[number, each["rank"]] = each
    return [[said[number, rank] for rank in (0, 1) if (number, rank) in said] for number in range(len(commands))]


def loaded(said: list[Said]) -> list[Any]:
    """The iteration and the rank of what each rank loaded, bit for bit."""
    assert [each.get("differs") for each in said] == [[], []], said
    return [each["id"][:2] for each in said]


def test_each_rank_alone(tmp_path: Path) -> None:
    first, *_, after_fork, _, after_spawn, _, lost = run(
        tmp_path, 1, "save:1", "save:2", "fork:3", "load", "spawn:4", "load", "lose:1", "load"
    )
    assert [each["ids"] for each in first] == [[[1, 0, "job"]], [[1, 1, "job"]]]
    assert loaded(after_fork) == [[3, 0], [3, 1]]
    assert loaded(after_spawn) == [[4, 0], [4, 1]]
    assert [each["iteration"] for each in lost] == [-1, -1]  # rank 1 has nothing, and nobody has a replica


def test_replicas(tmp_path: Path) -> None:
    """Commands that a comment does not explain prepare the next one."""
    one_disk_lost = ["save:1", "save:2", "lose:1", "load"]
    one_copy_damaged = ["save:3", "damage:0:0", "load"]
    both_damaged = ["save:4", "damage:0:0", "damage:1:0", "load", "load"]
    later = ["save:5", "save:6", "save:7", "save:8", "load"]
    said = run(tmp_path, 2, *one_disk_lost, *one_copy_damaged, *both_damaged, *later)
    assert not [each for number in (0, 1, 2, 4, 5, 7, 8, 9, 12, 13) for each in said[number] if "error" in each]
    both = [[2, 0, "job"], [2, 1, "job"]]
    assert [each["ids"] for each in said[1]] == [both, both]
    assert loaded(said[3]) == [[2, 0], [2, 1]]
    assert [each["ids"] for each in said[3]] == [both, []]

    assert loaded(said[6]) == [[3, 0], [3, 1]]
    assert [each["ids"] for each in said[6]] == [[[3, 1, "job"]], [[3, 0, "job"], [3, 1, "job"]]]

    assert {each["error"] for each in said[10]} == {"LocalCheckpointUnavailableError"}
    assert len({each["message"] for each in said[10]}) == 1
    assert "the local checkpoint of rank 0 from iteration 4 in" in said[10][0]["message"]
    assert [each["iteration"] for each in said[11]] == [-1, -1]

    assert loaded(said[-1]) == [[8, 0], [8, 1]]
    for each in said[-1]:  # what did not change is stored once; a pack of which half is used stays
        assert each["bytes"] < 2.2 * said[0][0]["bytes"]


@pytest.mark.race
@pytest.mark.parametrize("copies", effort([2], [1, 2]))
def test_a_rank_dies_in_a_save(tmp_path: Path, copies: int) -> None:
    """Whatever the other rank has, both load an iteration that is whole, and go on."""
    calls = [each["calls"] for each in run(tmp_path / "whole", copies, "save:1", "kill:0:0:0:2")[1]]
    every = [(rank, at, torn) for rank in (0, 1) for at in range(1, calls[rank] + 1) for torn in (0, 1)]
    for rank, at, torn in effort([(1, 5, 1)], every):
        folder = tmp_path / f"killed-{rank}-{at}-{torn}"
        run(folder, copies, "save:1", f"kill:{rank}:{at}:{torn}:2", fails=True)
        found, saved, again = run(folder, copies, "load", "save:3", "load")
        assert loaded(found) in ([[1, 0], [1, 1]], [[2, 0], [2, 1]]), (rank, at, torn)
        assert loaded(again) == [[3, 0], [3, 1]]
        assert [len(each["ids"]) for each in saved] == [copies, copies]
