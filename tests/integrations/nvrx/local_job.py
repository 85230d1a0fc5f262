"""Ranks under torchrun that keep local checkpoints: ``local_job FOLDER COPIES [COMMAND...]``. Each rank has a disk, ``FOLDER/diskRANK``.

With COPIES=2 the ranks replicate. Commands, of which each rank says what came of it:

    save:N, fork:N, spawn:N   a checkpoint of iteration N; in a process that NVRx forks or spawns
    lose:R                    the disk of rank R is empty
    damage:R:S                a block of the newest checkpoint of rank S on the disk of rank R is another
    kill:R:AT:TORN:N          save:N, in which rank R is killed with -9 at call AT of the backend; with TORN=1 in the middle of it
    load                      with a new manager, as after a restart
"""

import inspect
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

import tensorstore_ck as tsck
from tensorstore_ck.integrations.nvrx import rank_store
from tensorstore_ck.store import Store
from tests.integrations.kill_at import KillAt, open_killable
from tests.integrations.nvrx.on_cpu import differs, state_dict_of

WITHOUT_CUDA = {"cpu_shm_mode": True} if "cpu_shm_mode" in inspect.signature(AsyncCallsQueue.__init__).parameters else {}
"""Since NVRx 0.6 a persistent process begins with CUDA, unless tensors come in shared memory."""


class Rank:
    def __init__(self, folder: Path, copies: int) -> None:
        self.rank = dist.get_rank()
        self.disk = folder / f"disk{self.rank}"
        self.strategy = CliqueReplicationStrategy.from_replication_params(1, copies) if copies > 1 else None
        self.faults = KillAt()
        self.restart()

    def restart(self) -> None:
        self.manager = tsck.nvrx.LocalCheckpointManager(self.disk, "job", repl_strategy=self.strategy)

    def save(self, iteration: str) -> dict[str, Any]:
        assert self.manager.save(state_dict_of(self.rank, int(iteration)), int(iteration)) is None
        return self.held()

    def fork(self, iteration: str, *, persistent: bool = False) -> dict[str, Any]:
        queue = AsyncCallsQueue(persistent=persistent, **WITHOUT_CUDA)
        queue.schedule_async_request(self.manager.save(state_dict_of(self.rank, int(iteration)), int(iteration), is_async=True))
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        return {}

    def spawn(self, iteration: str) -> dict[str, Any]:
        return self.fork(iteration, persistent=True)

    def lose(self, rank: str) -> dict[str, Any]:
        if self.rank == int(rank):
            shutil.rmtree(self.disk)
        return {}

    def damage(self, rank: str, source: str) -> dict[str, Any]:
        """The random bytes of the weight are those that no other checkpoint shares."""
        if self.rank == int(rank):
            iteration = max(each[0] for each in self.manager._my_ckpt_ids())
            wanted = state_dict_of(int(source), iteration).sharded_state_dict["model"]["weight"].data.numpy().tobytes()
            damaged = 0
            for pack in (self.disk / "job" / rank / "store").rglob("*"):
                held = pack.read_bytes() if pack.is_file() else b""
                if (at := held.find(wanted)) >= 0:
                    pack.chmod(0o600)
                    pack.write_bytes(held[: at + 100] + bytes([held[at + 100] ^ 1]) + held[at + 101 :])
                    damaged += 1
            assert damaged
        dist.barrier()
        return {}

    def kill(self, rank: str, at: str, torn: str, iteration: str) -> dict[str, Any]:
        self.faults = KillAt(int(at) if self.rank == int(rank) else 0, torn=bool(int(torn)))
        vars(rank_store)["open_store"] = self._open
        self.faults.is_counting = True
        return self.save(iteration) | {"calls": self.faults.calls}

    def _open(self, path: Path, **_: object) -> Store:
        return open_killable(path, self.faults)

    def load(self) -> dict[str, Any]:
        dist.barrier()
        self.restart()
        iteration = self.manager.find_latest()
        if iteration == -1:
            return {"iteration": -1} | self.held()
        found, ckpt_id = self.manager.load()
        return {"iteration": iteration, "id": ckpt_id, "differs": differs(found, self.rank, iteration)} | self.held()

    def held(self) -> dict[str, Any]:
        store = self.manager.local_ckpt_dir / "store"
        return {
            "ids": sorted(self.manager._my_ckpt_ids()),
            "bytes": sum(each.stat().st_size for each in store.rglob("*") if each.is_file()),
        }


def main(folder: Path, copies: int, commands: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = Rank(folder, copies)
    for command in commands:
        name, *arguments = command.split(":")
        try:
            outcome = getattr(rank, name)(*arguments)
        except Exception as exc:  # noqa: BLE001 - said, for the test to judge
            outcome = {"error": type(exc).__name__, "message": str(exc)}
        sys.stdout.write(json.dumps({"rank": rank.rank, "command": command} | outcome) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # the pools of NVRx's threads and processes need not be waited for


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
