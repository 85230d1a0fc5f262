"""torchrun over two hosts, of which one disappears in the middle of a training: the example goes on with a spare one."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.scripts.launch import free_port, launched, torchrun

EXAMPLE, STEPS = "examples.torchrun_restart", "6"
pytestmark = [pytest.mark.slow, pytest.mark.race]


def agent(port: int, *arguments: str, is_first: bool) -> list[str]:
    """torchrun on one of two hosts; the first one has the key-value store of all agents, and gives up on another one after 3 s."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-id", "test", "--rdzv-backend", "c10d"]
    settings = f"is_host={is_first},keep_alive_interval=1,keep_alive_max_attempt=3"
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", settings]
    return ["-m", "torch.distributed.run", *options, *endpoint, *arguments]


def losses(printed: str) -> set[str]:
    """What the ranks ended with: each has a part of each batch."""
    return set(re.findall(r"loss (\S+)", printed))


def test_a_host_disappears(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("whole", "first", "second", "spare")}
    for folder in folders.values():
        folder.mkdir()
    with launched(torchrun(2, "-m", EXAMPLE, str(folders["whole"]), STEPS), folders["whole"]) as whole:
        code, printed = whole.end()
        assert code == 0, whole.errors()
    port = free_port()
    job = ["-m", "tests.integrations.launchers.killed_job", str(tmp_path), "3", EXAMPLE, str(tmp_path), STEPS]
    keep = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (
        launched(agent(port, *job, is_first=True), folders["first"], **keep) as first,
        launched(agent(port, *job, is_first=False), folders["second"], TESTS_HOST=str(folders["second"]), **keep) as second,
    ):
        first.wait_for("rank 0 leaves: rank 1 is dead")
        assert second.end()[0] != 0
        with launched(agent(port, *job, is_first=False), folders["spare"], **keep) as spare:
            ended = [first.end(), spare.end()]
            assert [code for code, _ in ended] == [0, 0], (first.errors(), spare.errors())
    assert losses("".join(told for _, told in ended)) == losses(printed)
