"""Folders as Megatron-core 0.16 to 0.19 write them in their format torch_dist, made by torch alone."""

import argparse
import enum
import io
import json
import pickle
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


class AttnBackend(enum.Enum):
    """As Megatron's."""

    auto = 5
    unknown = 99


class RerunMode(str, enum.Enum):  # noqa: UP042 - as Megatron's
    """As Megatron's."""

    DISABLED = "disabled"


_MODULES = {"megatron.core.transformer.enums": AttnBackend, "megatron.core.rerun_state_machine": RerunMode}


@contextmanager
def pickled_as_megatron() -> Iterator[None]:
    """Gives the enums the modules that Megatron's have."""
    parents = ("megatron", "megatron.core", "megatron.core.transformer")
    before = {name: sys.modules.get(name) for name in (*parents, *_MODULES)}
    for name in before:
        sys.modules[name] = ModuleType(name)
    for name, kind in _MODULES.items():
        vars(sys.modules[name])[kind.__name__] = kind
        kind.__module__ = name
    try:
        yield
    finally:
        for name, module_before in before.items():
            del sys.modules[name]
            if module_before is not None:
                sys.modules[name] = module_before


class _Planner(DefaultSavePlanner):
    """Leaves the plans of all ranks in the metadata, as Megatron does."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.all_local_plans = all_plans  # type: ignore[attr-defined]
        return plans, metadata


def tensors() -> dict[str, torch.Tensor]:
    return {
        "embedding.word_embeddings.weight": torch.randn(32, 16).bfloat16(),
        "decoder.layers.mlp.linear_fc1.weight": torch.randn(2, 64, 16).bfloat16(),
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": torch.randn(2, 64, 16),
    }


def objects() -> dict[str, Any]:
    return {
        "rng_state/shard_0.0_1.1": [{"torch": torch.get_rng_state(), "seed": 3, (torch.bfloat16, 1): [7]}],
        "rerun_state_machine_state/shard_0_1": {"mode": RerunMode.DISABLED},
        "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2": None,
        "decoder.layers.mlp.linear_fc2._extra_state/shard_0_2": io.BytesIO(b"fp8"),
    }


def common(iteration: int = 1000, **arguments: Any) -> dict[str, Any]:
    args = argparse.Namespace(
        attention_backend=AttnBackend.auto,
        params_dtype=torch.bfloat16,
        save=PosixPath("/checkpoints/gpt"),
        exit_signal=signal.SIGTERM,
        lr=0.01,
        nested=argparse.Namespace(x=(1, 2)),
        **arguments,
    )
    optimizer = {"optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "step": 7}]}, "param_state_sharding_type": "x"}
    return {
        "iteration": iteration,
        "checkpoint_version": 3.0,
        "args": args,
        "optimizer": optimizer,
        "opt_param_scheduler": {"num_steps": 9},
    }


def write(folder: Path, iteration: int = 1000, *, has_common_file: bool = True, **arguments: Any) -> dict[str, Any]:
    """Writes ``iter_N`` into `folder`; returns the sharded tensors.

    Args:
        folder: The folder of checkpoints.
        iteration: N.
        has_common_file: False: the common state is an object, as since 0.19.
        arguments: More in the Namespace of the common state.
    """
    path = folder / f"iter_{iteration:07}"
    path.mkdir(parents=True)
    held = tensors()
    with pickled_as_megatron():
        state = {**held, **{key: [value] for key, value in objects().items()}}
        if not has_common_file:
            state["common_state/shard_0_1"] = [common(iteration, **arguments)]
        dcp_save(
            state,
            storage_writer=FileSystemWriter(path, thread_count=2),
            planner=_Planner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
        if has_common_file:
            torch.save(common(iteration, **arguments), path / "common.pt")
    (path / "metadata.json").write_text(json.dumps({key: CONFIG[key] for key in CONFIG if has_common_file or "sharded" in key}))
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return held


def rewrite_metadata(path: Path, **attributes: Any) -> None:
    """Adds attributes to the pickle of DCP."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    vars(metadata).update(attributes)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
