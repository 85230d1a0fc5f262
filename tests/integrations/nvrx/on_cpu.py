"""NVRx on the CPU: what it does on CUDA devices whatever the backend (retrieval, asynchronous saves) is done on the CPU.

Importing it is enough. Megatron-core's `MCoreTensorAwareStateDict` is the state dict: it remembers where its tensors were.
"""

from argparse import Namespace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from megatron.core.transformer.enums import AttnBackend

_empty_like = torch.empty_like


def _on_cpu(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    if options.get("device") == "cuda":
        options["device"] = "cpu"
    return _empty_like(tensor, **options)


torch.empty_like = _on_cpu  # type: ignore[assignment]
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]


def tensors_of(rank: int, iteration: int) -> dict[str, torch.Tensor]:
    """A weight that changes at each iteration, one that never does, and a moment in bfloat16."""
    random = torch.Generator().manual_seed(1000 * rank + iteration)
    fixed = torch.Generator().manual_seed(rank)
    return {
        "weight": torch.randn(64, 1024, generator=random),
        "fixed": torch.randn(64, 1024, generator=fixed),
        "moment": torch.randn(33, 7, generator=random).bfloat16(),
    }


def state_dict_of(rank: int, iteration: int) -> MCoreTensorAwareStateDict:
    """As Megatron-LM's local checkpoints are."""
    sharded = {key: ShardedTensor.from_rank_offsets(key, tensor, (0, rank, 2)) for key, tensor in tensors_of(rank, iteration).items()}
    counters = ShardedObject("counters", {"seen": [iteration, None, b"\x00"]}, (2,), (rank,))
    return MCoreTensorAwareStateDict(
        common={
            "iteration": iteration,
            "lr": 0.1,
            "args": Namespace(backend=AttnBackend.fused, dtype=torch.bfloat16),
            "random": torch.arange(rank + 5),
        },
        sharded_state_dict={"model": sharded, "counters": counters},
    )


def differs(found: MCoreTensorAwareStateDict, rank: int, iteration: int) -> list[str]:
    """What of a state dict is not as `state_dict_of` made it."""
    if type(found) is not MCoreTensorAwareStateDict:
        return [type(found).__name__]
    made = state_dict_of(rank, iteration)
    wrong = [key for key, value in made.common.items() if key != "random" and found.common.get(key) != value]
    wrong += [] if found.common["random"].equal(made.common["random"]) else ["random"]
    for key, expected in made.sharded_state_dict["model"].items():
        tensor = found.sharded_state_dict["model"][key]
        if not (tensor.data.equal(expected.data) and tensor.without_data() == expected.without_data()):
            wrong.append(key)
    return wrong + ([] if found.sharded_state_dict["counters"] == made.sharded_state_dict["counters"] else ["counters"])
