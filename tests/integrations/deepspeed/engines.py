"""Small engines of every kind, and their training."""

import os
import random
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from tests.integrations.deepspeed.on_cpu import deepspeed

WORDS: Final = 50


class Kind(NamedTuple):
    """A ZeRO stage and a dtype."""

    stage: int
    dtype: str
    options: tuple[tuple[str, Any], ...] = ()
    """More options of ``zero_optimization``, and ``grad_accum_dtype``, which makes DeepSpeed take its BF16_Optimizer."""
    ep_size: int = 0
    """Over how many ranks the experts are spread; 0: there are none."""
    stages: int = 0
    """Of a pipeline; 0: it is none."""

    @property
    def family(self) -> str:
        """Kinds of one family load each other's snapshots."""
        return f"runs/{self.dtype}-" + ("experts-" if self.ep_size else "pipeline-" if self.stages else "")

    @property
    def ref(self) -> str:
        parts = self.ep_size or self.stages
        return self.family + (f"{parts}-" if parts else "") + str(self.stage) + "".join(f"-{name}" for name, _ in self.options)


class Net(nn.Module):
    """Tied, frozen and odd-sized parameters, dropout, and a buffer that differs by rank."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 24)
        self.inner, self.outer = nn.Linear(24, 37), nn.Linear(37, 24)
        self.fixed = nn.Linear(24, 24).requires_grad_(False)
        self.also_fixed = nn.Linear(24, 24).requires_grad_(False)
        self.also_fixed.weight = self.fixed.weight
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(24, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, words: torch.Tensor) -> Any:
        found = self.words(words)
        found = self.outer(self.drop(torch.tanh(self.inner(found)))) + self.fixed(found)
        return self.head(found)


class NetOfExperts(Net):
    """Four experts after it, of which each word takes one. They are different from the beginning; each has a buffer for its number."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(24, 19), nn.Tanh(), nn.Linear(19, 24))
        expert.register_buffer("number", torch.full((1,), -1.0))
        self.moe = deepspeed.moe.layer.MoE(24, expert, num_experts=4, ep_size=ep_size, k=1, capacity_factor=2.0)
        self.first = int(os.environ["RANK"]) % ep_size * self.moe.num_local_experts
        for number, each in enumerate(self.experts, self.first):
            nn.init.normal_(each[0].weight, std=0.2, generator=torch.Generator().manual_seed(number))

    @property
    def experts(self) -> Any:
        return self.moe.deepspeed_moe.experts.deepspeed_experts

    def write_numbers(self) -> None:
        """So that a load can be seen to restore them."""
        for number, each in enumerate(self.experts, self.first):
            each.number.fill_(number)

    def forward(self, words: torch.Tensor) -> Any:
        found = self.words(words)
        found = self.outer(self.drop(torch.tanh(self.inner(found)))) + self.fixed(found)
        mixed, balance, _ = self.moe(found)
        return self.head(found + mixed) + 0.01 * balance


class Words(nn.Module):
    """The first layer of a pipeline, and the last, which are tied: so large that ZeRO cuts it, and in each stage at another element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(160, 24))

    def forward(self, words: torch.Tensor) -> Any:
        return nn.functional.embedding(words, self.weight)


class Block(nn.Module):
    """A layer of a pipeline, with a buffer that counts on each rank."""

    seen: torch.Tensor

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(24, 37), nn.Linear(37, 24)
        self.inner.weight.requires_grad_(not frozen)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, found: torch.Tensor) -> Any:
        self.seen += int(os.environ["RANK"]) + 1
        return found + self.outer(self.drop(torch.tanh(self.inner(found))))


def pipeline(stages: int) -> Any:
    """Six layers, which have the same weights on any number of stages."""
    words = partial(deepspeed.pipe.TiedLayerSpec, "words", Words)
    blocks = [deepspeed.pipe.LayerSpec(Block, frozen) for frozen in (False, False, True, False)]
    layers = [words(), *blocks, words(forward_fn=lambda layer, found: nn.functional.linear(found, layer.weight))]
    net = deepspeed.pipe.PipelineModule(layers, num_stages=stages, partition_method="uniform", loss_fn=loss_of)
    for name, each in net.named_parameters():
        nn.init.normal_(each, std=0.2, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return net


def loss_of(found: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(found.float().flatten(0, 1), words.flatten())


def join() -> int:
    """Makes this process a rank, as torchrun says; returns its number."""
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    deepspeed.init_distributed("gloo")
    return int(os.environ["RANK"])


def make(kind: Kind, *, decays: Callable[[nn.Parameter], bool] = lambda each: each.ndim > 1) -> Any:
    """A new engine with two parameter groups, of which the first has weight decay, and a schedule."""
    torch.manual_seed(0)
    random.seed(0)
    options = dict(kind.options)
    config: dict[str, Any] = {
        "data_types": {"grad_accum_dtype": options.pop("grad_accum_dtype", None)},
        "checkpoint": {"load_universal": options.pop("load_universal", False)},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": max(2 * kind.stages // int(os.environ["WORLD_SIZE"]), 1),
        "zero_optimization": {"stage": kind.stage, **options},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    if kind.dtype != "fp32":
        config[kind.dtype] = {"enabled": True}
    if kind.dtype == "fp16":
        config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 2}
    net = pipeline(kind.stages) if kind.stages else NetOfExperts(kind.ep_size) if kind.ep_size else Net()
    trained = [each for each in net.parameters() if each.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [each for each in trained if decays(each)], "weight_decay": 0.1, "name": "decayed"},
        {"params": [each for each in trained if not decays(each)], "weight_decay": 0.0, "name": "others"},
    ]
    if kind.ep_size:
        groups = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(groups)
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config=config)
    return engine


def make_words(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(1000 * step + rank))


def train_pipeline(engine: Any, step: int) -> float:
    """The mean loss of a step, in which each pipeline gets words of its own; all of them together get the same, however many there are."""
    first = engine.grid.get_data_parallel_rank() * engine.micro_batches
    words = [make_words(step, first + number) for number in range(engine.micro_batches)]
    return float(engine.train_batch(iter([(each, each) for each in words])))


def train(engine: Any, rank: int, steps: range) -> list[float]:
    """The losses of these steps."""
    losses = []
    for step in steps:
        if engine.pipeline_parallelism:
            losses.append(train_pipeline(engine, step))
            continue
        words = make_words(step, rank)
        loss = loss_of(engine(words), words)
        engine.backward(loss)
        engine.step()
        engine.module.seen += rank + 1
        losses.append(loss.item())
    return losses
