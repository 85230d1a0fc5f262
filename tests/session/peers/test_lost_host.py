"""Every process of a job is killed, and one host's disk is gone: the restarted job has what all had staged, in its layout or another."""

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.backend.staging import Uploader
from tests.effort import PATIENCE_SECONDS
from tests.session.group.pool import rank_process

RANKS: Final = 3
ELEMENTS: Final = 900_000
SECONDS: Final = PATIENCE_SECONDS


def state(step: int) -> dict[str, Any]:
    start, stop = (ELEMENTS * each // dist.get_world_size() for each in (dist.get_rank(), dist.get_rank() + 1))
    return {"w": tsck.FlatShard(torch.arange(start, stop) + step, (ELEMENTS,), start), "step": step}


def job(rank: int, folder: str, port: int, phase: str, hosts: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    server = dist.TCPStore("127.0.0.1", port)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=server, rank=rank, world_size=len(hosts))
    group: Any = dist.group.WORLD
    staging = tsck.Staging(f"{folder}/host-{hosts[rank]}", replicate_to_peers=1, capacity="1GB")
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}", staging=staging) as store:
        if phase == "first":
            for step in range(2):
                store.put_snapshot_async(state(step), ref="job", step=step, group=group).wait(SECONDS)
            stop_uploads_of_packs()
            store.put_snapshot_async(state(2), ref="job", step=2, group=group, rank_state={"rank": rank}).staged.wait(SECONDS)
            assert wait_for(lambda: len(manifests(folder, rank)) == 2)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        if phase == "staged":
            stop_uploads_of_packs()
            target = store.checkout("job^staged", into=state(9), group=group)
            assert torch.equal(target["w"].local, state(2)["w"].local)
            assert [snapshot.step for snapshot in store.log("job")] == [1, 0]
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        target = store.checkout("job", into=state(9), group=group)
        assert target["step"] == 2
        assert torch.equal(target["w"].local, state(2)["w"].local)
        assert store.rank_state("job", group=group) == {"rank": rank}
        assert [snapshot.step for snapshot in store.log("job")] == [2, 1, 0]
        dist.barrier()
        assert manifests(folder, rank) == []
    dist.destroy_process_group()


def stop_uploads_of_packs() -> None:
    """Parts go to the store while a save is staged; what is staged then stays on the disks."""
    upload = Uploader.upload

    def stopped(self: Uploader, names: Any, **options: Any) -> None:
        if "on_bytes" in options:
            threading.Event().wait()
        upload(self, names, **options)

    Uploader.upload = stopped  # type: ignore[method-assign, assignment]


def manifests(folder: str, rank: int) -> list[Path]:
    return list(Path(folder, f"host-{rank}").glob("*/staged/*-?"))


def wait_for(condition: Any) -> bool:
    pause = threading.Event()
    return any(condition() or pause.wait(0.02) for _ in range(int(SECONDS / 0.02)))


def run(folder: Path, phase: str, hosts: tuple[int, ...] = tuple(range(RANKS))) -> list[int | None]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    processes = [rank_process(job, rank, str(folder), server.port, phase, hosts) for rank in range(len(hosts))]
    for process in processes:
        process.start()
    for process in processes:
        process.join(2 * SECONDS)
    return [process.exitcode for process in processes]


@pytest.mark.slow
@pytest.mark.race
def test_a_job_goes_on_from_the_survivors(tmp_path: Path) -> None:
    tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache").close()
    assert run(tmp_path, "first") == [-signal.SIGKILL] * RANKS
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
        assert [snapshot.step for snapshot in store.log("job")] == [1, 0]
    shutil.rmtree(tmp_path / "host-1")
    assert run(tmp_path, "again") == [0] * RANKS


@pytest.mark.slow
@pytest.mark.race
@pytest.mark.parametrize("hosts", [(0, 2), (2, 0, 3, 4)], ids=["fewer ranks", "more ranks"])
def test_another_layout_is_restored_from_the_memory_of_the_survivors(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    """No pack is in the store. Whoever restored it is killed, too, and the same ranks as before go on from the same files."""
    tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache").close()
    assert run(tmp_path, "first") == [-signal.SIGKILL] * RANKS
    shutil.rmtree(tmp_path / "host-1")
    assert run(tmp_path, "staged", hosts) == [-signal.SIGKILL] * len(hosts)
    assert run(tmp_path, "again") == [0] * RANKS
