"""DeepSpeed engines of ranks that do not run: tensors without contents, cut as ZeRO cuts them, for `EngineState` and `fragments_of`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from benches._model import llama_shapes

ALIGNMENT: Final = 2
"""ZeRO 1 and 2 pad a flat group to a multiple of as many elements for each rank (``nccl_start_alignment_factor``)."""
Shapes = Mapping[str, tuple[int, ...]]


class Rank(NamedTuple):
    """In place of a process group."""

    rank: int
    ranks: int


MODELS: Final = {
    "Llama 3.2 1B": llama_shapes(2048, 16, 8192, 512, is_tied=True),
    "Llama 3.1 8B": llama_shapes(4096, 32, 14336, 1024),
    "Llama 3.1 70B": llama_shapes(8192, 80, 28672, 1024),
}


def _model(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    whole = nn.Module()
    for name, parameter in parameters.items():
        at = whole
        *path, last = name.split(".")
        for each in path:
            if each not in at._modules:
                at.add_module(each, nn.Module())
            at = at._modules[each]  # type: ignore[assignment]
        at.register_parameter(last, parameter)
    return whole


def zero_engine(shapes: Shapes, stage: int, at: Rank, device: str = "cpu") -> Any:
    """The engine of a rank in bfloat16 with AdamW: a group with weight decay for matrices, and one without. ``meta``: without memory."""
    with torch.device(device):
        return _engine(shapes, stage, at)


def _parameter(size: int, **attributes: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(size, dtype=torch.bfloat16))
    vars(parameter).update(attributes)
    return parameter


def _engine(shapes: Shapes, stage: int, at: Rank) -> Any:
    cut: dict[str, Any] = {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        part = -(-size // at.ranks)
        if stage < 3:
            cut[name] = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
        else:
            held = torch.empty(part, dtype=torch.bfloat16)
            cut[name] = _parameter(
                0, ds_shape=torch.Size(shape), ds_numel=size, ds_tensor=held, ds_process_group=at, partition_numel=lambda part=part: part
            )
    groups = [[cut[name] for name, shape in shapes.items() if (len(shape) > 1) == is_matrix] for is_matrix in (True, False)]
    if stage < 3:
        sizes = [sum(each.numel() for each in group) for group in groups]
        flats = [torch.empty(-(-size // (ALIGNMENT * at.ranks)) * ALIGNMENT) for size in sizes]
        optimizer: Any = object.__new__(DeepSpeedZeroOptimizer)
        optimizer.round_robin_bit16_groups, optimizer.real_dp_process_group = groups, [at] * len(groups)
        optimizer.round_robin_bit16_offsets = [_offsets(group) for group in groups]
        optimizer.single_partition_of_fp32_groups, optimizer.update_lp_params = flats, lambda: None
    else:
        flats = [torch.empty(sum(each.partition_numel() for each in group)) for group in groups]
        optimizer = object.__new__(DeepSpeedZeroOptimizer_Stage3)
        optimizer.fp16_groups, optimizer.sub_group_to_group_id = groups, dict(enumerate(range(len(groups))))
        optimizer.fp32_partitioned_groups_flat = optimizer.fp16_partitioned_groups_flat = flats
    options = [{"params": [flat], "weight_decay": decay} for flat, decay in zip(flats, (0.1, 0.0), strict=True)]
    optimizer.optimizer = torch.optim.AdamW(options, lr=1e-4)
    for flat in flats:
        moments = {name: torch.empty_like(flat, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.optimizer.state[flat] = {"step": torch.tensor(1.0), **moments}
    optimizer.loss_scaler = SimpleNamespace(cur_scale=1.0)
    counters = {"global_steps": 1, "global_samples": 4, "skipped_steps": 0, "micro_steps": 1}
    return SimpleNamespace(
        module=_model(cut), optimizer=optimizer, lr_scheduler=None, has_moe_layers=False, pipeline_parallelism=False, **counters
    )


def _offsets(group: list[nn.Parameter]) -> list[int]:
    return [0, *accumulate(each.numel() for each in group)][:-1]


@contextmanager
def given_ranks() -> Iterator[None]:
    """Lets the code find the rank of a `Rank`."""
    with patch.object(torch.distributed, "get_rank", lambda group: group.rank):
        yield
