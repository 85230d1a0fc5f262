"""torchft: a rank of a replica group dies in a save; the other replica group goes on, and saves in its place."""

from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="torchft is not installed: run `make test-apart`")

from torchft.coordination import LighthouseServer

import tensorstore_ck as tsck
from tests.end_to_end.scripts.launch import Program, free_port, launched

EXAMPLE, STEPS = "examples.torchft_loop", 8
pytestmark = [pytest.mark.slow, pytest.mark.race]


def test_a_rank_of_a_replica_group_dies(tmp_path: Path) -> None:
    job = ["-m", "tests.integrations.launchers.killed_job", str(tmp_path), "3", EXAMPLE, str(tmp_path), str(STEPS)]
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=5_000)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    with ExitStack() as stack:
        stack.callback(lighthouse.shutdown)

        def start(replica: int, rank: int, port: int) -> Program:
            folder = tmp_path / f"{replica}-{rank}"
            folder.mkdir()
            variables = {"REPLICA": str(replica), "RANK": str(rank), "WORLD_SIZE": "2", "TESTS_READY": "4", "TESTS_KILLS": "self"}
            host = {} if replica else {"TESTS_HOST": str(folder)}
            there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHFT_LIGHTHOUSE": address}
            return stack.enter_context(launched(job, folder, **variables, **host, **there))

        ports = [free_port(), free_port()]
        replicas = [[start(replica, rank, ports[replica]) for rank in (0, 1)] for replica in (0, 1)]
        replicas[0][0].wait_for("rank 0 leaves: rank 1 is dead")
        assert [rank.end()[0] != 0 for rank in replicas[0]] == [True, True]
        ended = [rank.end() for rank in replicas[1]]
    assert [code for code, _ in ended] == [0, 0], replicas[1][0].errors()
    assert all("step 1 of 2 replica groups" in told and f"step {STEPS} of 1 replica groups" in told for _, told in ended)
    with tsck.open(tmp_path / "store", read_only=True) as store:
        assert store.resolve("runs/torchft").step == STEPS
