"""Small engines of every kind, and their training."""

import os
import random
from collections.abc import Callable
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
    """More options of ``zero_optimization``."""

    @property
    def ref(self) -> str:
        return f"runs/{self.dtype}-{self.stage}" + "".join(f"-{name}" for name, _ in self.options)


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


def join() -> int:
    """Makes this process a rank, as torchrun says; returns its number."""
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    deepspeed.init_distributed("gloo")
    return int(os.environ["RANK"])


def make(kind: Kind, *, decays: Callable[[nn.Parameter], bool] = lambda each: each.ndim > 1) -> Any:
    """A new engine with two parameter groups, of which the first has weight decay, and a schedule."""
    torch.manual_seed(0)
    random.seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": kind.stage, **dict(kind.options)},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    if kind.dtype != "fp32":
        config[kind.dtype] = {"enabled": True}
    if kind.dtype == "fp16":
        config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 2}
    net = Net()
    trained = [each for each in net.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if decays(each)], "weight_decay": 0.1},
        {"params": [each for each in trained if not decays(each)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config=config)
    return engine


def train(engine: Any, rank: int, steps: range) -> list[float]:
    """The losses of these steps."""
    losses = []
    for step in steps:
        words = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = nn.functional.cross_entropy(engine(words).float().flatten(0, 1), words.flatten())
        engine.backward(loss)
        engine.step()
        engine.module.seen += rank + 1
        losses.append(loss.item())
    return losses
