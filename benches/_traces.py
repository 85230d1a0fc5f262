"""Real states to measure codecs on: a GPT that is trained here, on text that is here, with fp32 masters, bf16 weights and Adam's moments.

The text is Python's own library; a token is one of the most frequent pairs of bytes, so that every row of the embedding is in use.
"""

import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

VOCABULARY: Final = 2048
WIDTH: Final = 320
LAYERS: Final = 8
HEADS: Final = 5
CONTEXT: Final = 64
BATCH: Final = 8
WARM_UP: Final = 200
"""Steps before the first snapshot."""

State = dict[str, Any]


def tokens(limit_bytes: int = 8 << 20) -> torch.Tensor:
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > limit_bytes:
            break
    pairs = [text[at : at + 2] for at in range(0, len(text) - 1, 2)]
    number = {pair: index for index, (pair, _) in enumerate(Counter(pairs).most_common(VOCABULARY))}
    return torch.tensor([number[pair] for pair in pairs if pair in number])


class Block(nn.Module):
    """Attention and a two-layer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return y


class Gpt(nn.Module):
    """Eleven million parameters, unless it is wider."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for name, weights in self.named_parameters():
            if weights.dim() == 2:
                nn.init.normal_(weights, std=0.02 / (2 * LAYERS) ** 0.5 if "out" in name or "down" in name else 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.places.weight)))
        return logits


class Adapted(nn.Module):
    """A frozen linear layer and its trained low-rank adapter: LoRA, arXiv:2106.09685."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) * frozen.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.frozen(x) + ((x.float() @ self.down.T) @ self.up.T).to(x.dtype)
        return y


def loss_of(model: nn.Module, text: torch.Tensor, batch: int) -> torch.Tensor:
    """On text from all over."""
    starts = torch.randint(len(text) - CONTEXT - 1, (batch,)).tolist()
    window = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def pretraining(steps_apart: int, snapshots: int, *, warm_up: int = WARM_UP, beta2: float = 0.95) -> Iterator[State]:
    """The states of a run, the first after its warm-up: always the same tensors, which the run changes further."""
    torch.manual_seed(0)
    text, model = tokens(), Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, beta2), weight_decay=0.1)
    names: dict[torch.Tensor, str] = {weights: name for name, weights in model.named_parameters()}
    for step in range(warm_up + steps_apart * (snapshots - 1) + 1):
        if step >= warm_up and (step - warm_up) % steps_apart == 0:
            moments = {names[weights]: {key: state[key] for key in ("exp_avg", "exp_avg_sq")} for weights, state in optimizer.state.items()}
            masters = {name: weights.detach() for weights, name in names.items()}
            yield {
                "weights": {name: each.bfloat16() for name, each in masters.items()},
                "masters": masters,
                "moments": moments,
                "step": step,
            }
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1, (step + 1) / WARM_UP)
        loss = loss_of(model, text, BATCH)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def lora(snapshots: int = 6, rank: int = 8, width: int = 1280) -> Iterator[tuple[str, State]]:
    """A frozen base of 160 million parameters in bf16, and trained adapters next to its attention, with their moments."""
    torch.manual_seed(1)
    text, model = tokens(), Gpt(width).bfloat16().requires_grad_(requires_grad=False)
    base = {name: weights.detach() for name, weights in model.named_parameters()}
    adapted: list[Adapted] = []
    for block in model.blocks:
        assert isinstance(block, Block)
        block.qkv, block.out = Adapted(block.qkv, rank), Adapted(block.out, rank)  # type: ignore[assignment]
        adapted += [block.qkv, block.out]  # type: ignore[list-item]
    learned = {f"{number}.{side}": getattr(each, side) for number, each in enumerate(adapted) for side in ("down", "up")}
    optimizer = torch.optim.AdamW(learned.values(), lr=1e-3)
    for step in range(snapshots):
        optimizer.zero_grad()
        loss_of(model, text, 1).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        moments = {name: {key: optimizer.state[each][key] for key in ("exp_avg", "exp_avg_sq")} for name, each in learned.items()}
        yield "lora", {"base": base, "adapters": {name: each.detach() for name, each in learned.items()}, "moments": moments, "step": step}


def sparse_bf16(snapshots: int = 40, share: float = 0.005) -> Iterator[tuple[str, State]]:
    """As reinforcement learning leaves bf16 weights: few elements change at each step, by one or two units in the last location."""
    generator = torch.Generator().manual_seed(2)
    weights = {name: each.detach().bfloat16() for name, each in Gpt().named_parameters()}
    for step in range(snapshots):
        yield "rl", {"weights": weights, "step": step}
        for each in weights.values():
            bits = each.view(torch.int16).reshape(-1)
            chosen = torch.rand(bits.shape, generator=generator) < share
            bits[chosen] += torch.randint(-2, 3, (int(chosen.sum()),), generator=generator, dtype=torch.int16)


def fork() -> Iterator[tuple[str, State]]:
    """Two jobs that go on from one snapshot: the second one changes a tenth of the layers."""
    state = next(pretraining(1, 1, warm_up=3))
    yield "job-a", state
    for step in (1, 2):
        state["step"] += step
        for name, each in state["masters"].items():
            if "blocks.3" in name:
                each.add_(torch.randn(each.shape), alpha=1e-4)
                state["weights"][name] = each.bfloat16()
        yield "job-a" if step == 1 else "job-b", state


def embedding(snapshots: int = 10, rows: int = 200_000, width: int = 64, share: float = 0.01) -> Iterator[tuple[str, State]]:
    """A table in fp32, of which each snapshot has seen one row in a hundred, with its sparse moments."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(rows, width, generator=generator) * 0.05
    moment = torch.zeros(rows, width)
    for step in range(snapshots):
        yield "table", {"table": table, "moment": moment, "step": step}
        seen = torch.randperm(rows, generator=generator)[: int(rows * share)]
        moment[seen] = 0.9 * moment[seen] + 0.1 * torch.randn(len(seen), width, generator=generator)
        table[seen] -= 0.01 * moment[seen]


TRACES: dict[str, Callable[[], Iterator[tuple[str, State]]]] = {
    "pre-training, 10 steps apart": lambda: (("gpt", state) for state in pretraining(10, 17)),
    "pre-training, 50 steps apart": lambda: (("gpt", state) for state in pretraining(50, 9)),
    "LoRA": lora,
    "RL, 0.5 % of bf16": sparse_bf16,
    "fork of a job": fork,
    "embedding, 1 % of rows": embedding,
}


def flat(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a state, by path, as bytes."""
    if isinstance(state, torch.Tensor):
        return {prefix: state.detach().contiguous().reshape(-1).view(torch.uint8)}
    return (
        {path: each for key, value in state.items() for path, each in flat(value, f"{prefix}.{key}").items()}
        if isinstance(state, dict)
        else {}
    )


def copy_of(state: Any) -> Any:
    """A deep copy."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    return {key: copy_of(value) for key, value in state.items()} if isinstance(state, dict) else state
