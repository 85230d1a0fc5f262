"""What stock Megatron writes and reads, under torchrun: ``folders_job FOLDER save LAYOUT TP`` and ``compare LAYOUT TP STORE REF PATH...``.

``save`` trains 2 steps and saves with Megatron's own strategy into ``iter_0000002``, as Megatron-LM does, and into a store. ``compare``
loads checkpoints, each with the strategy that it names, and the newest snapshot of a ref, and ends with an error if two of them differ.
"""

import argparse
import signal
import sys
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.optimizer import OptimizerConfig
from megatron.core.rerun_state_machine import RerunState
from megatron.core.transformer.enums import AttnBackend, CudaGraphScope

import tensorstore_ck as tsck
import tests.integrations.megatron.on_cpu  # noqa: F401
from tensorstore_ck.integrations.megatron_layout import COMMON_OBJECT
from tests.integrations.importing.same import require_same
from tests.integrations.megatron.gpt import Job, join, leave
from tests.integrations.rank_runs import say

VALUES = {
    "args": argparse.Namespace(
        attention_backend=AttnBackend.auto,
        cuda_graph_scope=[CudaGraphScope.attn, CudaGraphScope.mlp],
        params_dtype=torch.bfloat16,
        save=PosixPath("/checkpoints"),
        exit_signal=signal.SIGTERM,
        lr=0.01,
        data_path=["a", "b"],
        nested=argparse.Namespace(x=(1, 2)),
    ),
    "optimizer_config": OptimizerConfig(lr=0.1, params_dtype=torch.bfloat16),
    "rerun": RerunState.INITIAL_RUN,
    "num_floating_point_operations_so_far": 1e15,
}


def save(folder: Path, job: Job) -> None:
    job.train()
    job.train()
    path = folder / f"iter_{job.step:07d}"
    if dist.get_rank() == 0:
        path.mkdir()
        (folder / "latest_checkpointed_iteration.txt").write_text(str(job.step))
    dist.barrier()
    state = {**job.sharded_state_dict(), **VALUES}
    dist_checkpointing.save(state, str(path), content_metadata=dict(job.metadata))
    with tsck.megatron.register(folder / "store", ref="runs/here") as registered:
        light = folder / "light" / path.name
        if dist.get_rank() == 0:
            light.mkdir(parents=True)
        dist.barrier()
        state = {**job.sharded_state_dict(), **VALUES}
        dist_checkpointing.save(state, str(light), registered.save, content_metadata=dict(job.metadata))
    say(saved=str(path))


def load(job: Job, path: str) -> Any:
    """All that a checkpoint has for this rank; without what each rank has of its own if another number of ranks saved it."""
    job.metadata = dist_checkpointing.load_content_metadata(path)
    stored = load_sharded_metadata(path)
    wanted = job.sharded_state_dict(is_loading=True)
    if f"rng_state/shard_{dist.get_rank()}_{dist.get_world_size()}" not in stored:
        del wanted["rng_state"], wanted["rerun_state_machine_state"]
    loaded = dist_checkpointing.load(wanted, path)
    stored.pop(COMMON_OBJECT, None)  # since 0.19, but for an exported folder, whose common state is a file
    shapes = {key: (tuple(each.global_shape), getattr(each, "dtype", None)) for key, each in sorted(stored.items())}
    return [loaded, dist_checkpointing.load_common_state_dict(path), shapes]


def plain(value: Any) -> Any:
    """For `require_same`: objects as dicts, and dicts in one order."""
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple) and type(value) is not torch.Size:
        return type(value)(plain(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, argparse.Namespace | OptimizerConfig):
        return {"type": type(value).__name__, "held": plain(vars(value))}
    return value


def compare(job: Job, store: str, ref: str, paths: list[str]) -> None:
    with tsck.megatron.register(store, ref=ref) as registered:
        named = registered.write_folder(Path(store).parent / f"named-{dist.get_world_size()}")
        first = plain(load(job, paths[0]))
        for path in (*paths[1:], str(named)):
            require_same(plain(load(job, path)), first)
            say(same=path, keys=len(first[2]))


def main(folder: Path, what: str, layout: str, tensor: int, *more: str) -> None:
    join(tensor, 1)
    job = Job(tensor, 1, layout)
    if what == "save":
        save(folder, job)
    else:
        compare(job, more[0], more[1], list(more[2:]))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
