"""A transformer's training loop on a device, with a save every few steps: how long each interval takes."""

import statistics
import time
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional

State = dict[str, torch.Tensor]


class Pending(Protocol):
    def wait(self) -> Any: ...


class Shape(NamedTuple):
    width: int
    layers: int
    length: int
    batch: int
    words: int
    steps: int
    every: int


LARGE = Shape(1536, 16, 1024, 12, 32000, 120, 20)
"""550 M parameters: 6.6 GB with the moments of AdamW, about 0.1 s a step on an H200."""
SMALL = Shape(128, 2, 64, 2, 1000, 24, 4)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        added: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + added


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width) for _ in range(shape.layers)))
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.blocks(self.embedding(words))).float()
        return functional.cross_entropy(scores.flatten(0, 1), words.flatten())


class Saver(Protocol):
    def prepare(self, state: State, optimizer: torch.optim.Optimizer) -> None: ...

    def put_async(self, state: State, optimizer: torch.optim.Optimizer) -> Pending: ...


def run_loop(device: str, saver: Saver | None) -> dict[str, object]:
    """The figures of one loop, which `saver` saves every few steps; the first intervals are without saves."""
    shape = LARGE if device == "cuda" else SMALL
    torch.manual_seed(0)
    model = Model(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)

    updates = list[float]()

    def step() -> None:
        words = torch.randint(shape.words, (shape.batch, shape.length), device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(words)
        loss.backward()
        begin = time.perf_counter()
        optimizer.step()
        updates.append(round((time.perf_counter() - begin) * 1e3, 1))
        optimizer.zero_grad(set_to_none=True)

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(4):
        step()
    state = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    for number, each in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{number}.{name}": value for name, value in each.items()}
    if saver is not None:
        saver.prepare(state, optimizer)
    without_saves = 2 * shape.every + shape.every // 2
    calls, intervals, pending, last = [], [], None, 0.0
    after_saves, is_saved = [], False
    for number in range(1, shape.steps + 1):
        step()
        if is_saved:
            after_saves.append(updates[-1])
            is_saved = False
        if saver is not None and number > without_saves and number % shape.every == 0:
            before = time.perf_counter()
            pending = saver.put_async(state, optimizer)
            calls.append(round((time.perf_counter() - before) * 1e3, 1))
            is_saved = True
        if number % shape.every == shape.every // 2:  # one save in each interval
            synchronize()
            if number > shape.every:
                intervals.append(round((time.perf_counter() - last) * 1e3, 1))
            last = time.perf_counter()
    begin = time.perf_counter()
    if pending is not None:
        pending.wait()
    alone, saved = intervals[:2], intervals[2:]
    step_ms = min(alone) / shape.every
    added = [round(each - min(alone), 1) for each in saved]
    return {
        "state GB": round(sum(tensor.nbytes for tensor in state.values()) / 1e9, 2),
        "ms a step": round(step_ms, 1),
        f"intervals of {shape.every} steps without saves, ms": alone,
        "calls, ms": calls,
        "CPU's time in the optimizer's step after each save, ms; median of others": [after_saves, statistics.median(updates)],
        "added by each save, ms": added,
        "added by a save (median), steps": round(statistics.median(added) / step_ms, 2),
        "last save durable s after the loop": round(time.perf_counter() - begin, 2),
    }
