"""SGLang's workers at the newest snapshot of a branch: a custom weight loader (read against SGLang 0.5.23).

    engine = sglang.Engine(model_path=model, custom_weight_loader=["examples.sglang_follower.load"])
    ...
    root = store.resolve("runs/rl").root                      # once, so that all workers take the same version
    version = named("s3://bucket/ckpt", "runs/rl", root, prefix="model.")
    engine.begin_weight_update()
    engine.update_weights_from_tensor(version, load_format="examples.sglang_follower.load")
    engine.end_weight_update()

SGLang passes a loader named tensors alone: here one, whose bytes say which version. The weights are held in host memory under the names of
the checkpoint: each worker of a tensor-parallel group holds a part of the tensors, and reads what changed in it. SGLang serves nothing
during the call. A load that fails on one worker raises on all, and an error of a loader ends SGLang's engine: start it again. Not for
engines with a draft model: SGLang calls the loader for that, too.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group

from examples.held_weights import HeldWeights

NAME = "tensorstore_ck.version"


def named(url: str, ref: str, root: str, prefix: str = "", host_cache: str | None = None) -> list[tuple[str, torch.Tensor]]:
    """What `update_weights_from_tensor` takes for a version."""
    text = json.dumps([url, ref, prefix, host_cache, root])
    return [(NAME, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """In a worker: loads the version into its model."""
    ((name, tensor),) = named_tensors
    if name != NAME:
        raise ValueError(f"{name}: pass what `named` returns")
    *followed, root = json.loads(bytes(tensor.cpu().tolist()))
    held = held_weights(*followed)
    held.stage(root)
    held.load(model.load_weights, again=True)  # SGLang has prepared the model for a load, also of the version that it has


@cache
def held_weights(url: str, ref: str, prefix: str, host_cache: str | None) -> HeldWeights:
    """This process's part. With pipeline parallelism each stage is called in its turn, so that a stage's workers hold all tensors."""
    return HeldWeights(url, ref, prefix, host_cache=host_cache, workers=get_tp_group())
