"""Prints the demo's output."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.demo.compare import Container, leaves
from examples.demo.supervisor import Life
from examples.demo.train import Config

CURVE_WIDTH = 60


def title(url: Path, config: Config) -> None:
    """The introduction."""
    _print("A training run that survives kill -9", bold=True)
    _print(
        f"""
A GPT of {config.layers} layers learns Python from the sources of Python's own standard library, byte by byte:
{config.steps} steps of AdamW with warm-up, cosine decay, dropout, gradient accumulation and shuffled data.
Every {config.snapshot_every} steps it saves a snapshot to a store: weights, optimizer, schedule, data position,
random numbers, losses. A job that died resumes from store.checkout(ref).

   the job    {Path(__file__).with_name("train.py")}
   the store  {url}"""
    )


def chapter(number: int, name: str) -> None:
    """A heading."""
    _print()
    _print(f"{number}  {name}", bold=True)


def progress(current: Life) -> None:
    """The job's progress, on a line that is overwritten; only on a terminal."""
    if sys.stdout.isatty() and current.losses:
        loss = float.fromhex(current.losses[current.last_step])
        print(f"\r   step {current.last_step:3}  loss {loss:.3f}\x1b[K", end="", flush=True)


def life(number: int, ended: Life, how: str) -> None:
    """The outcome of one process."""
    if sys.stdout.isatty():
        print("\r\x1b[K", end="")
    if ended.losses:
        steps = f"steps {min(ended.losses):3}-{ended.last_step:<3}  loss {float.fromhex(ended.losses[ended.last_step]):.3f}"
    else:
        steps = "no step" + " " * 18
    _print(f"   process {number}  {steps}  {how}")


def curve(losses: Sequence[float], kills: Sequence[int]) -> None:
    """The losses as a row of bars, with the kills below."""
    low, high = min(losses), max(losses)
    bars, marks = "", [" "] * CURVE_WIDTH
    for column in range(CURVE_WIDTH):
        piece = losses[
            column * len(losses) // CURVE_WIDTH : max((column + 1) * len(losses) // CURVE_WIDTH, column * len(losses) // CURVE_WIDTH + 1)
        ]
        bars += "▁▂▃▄▅▆▇█"[math.floor((sum(piece) / len(piece) - low) / (high - low) * 7.99)] if high > low else "▁"
    for step in kills:
        marks[min(step * CURVE_WIDTH // len(losses), CURVE_WIDTH - 1)] = "^"
    _print(f"   loss {losses[0]:.3f} {bars} {losses[-1]:.3f}")
    if kills:
        _print(f"              {''.join(marks).rstrip()}  ^ killed")


def check(what: str, good: bool, details: str) -> bool:
    """One line of the comparison; returns `good`."""
    _print(f"   {'identical' if good else 'DIFFERENT'}  {what:20} {details}")
    return good


def contents(value: Any) -> str:
    """The size of a part of the state."""
    found = [leaf for _, leaf in leaves(value) if not isinstance(leaf, Container)]
    tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
    texts = [f"{counted(len(tensors), 'tensor')} of {size(sum(tensor.nbytes for tensor in tensors))}"] if tensors else []
    return ", ".join([*texts, *([counted(len(found) - len(tensors), "value")] if len(found) > len(tensors) else [])])


def counted(count: int, thing: str) -> str:
    """A number and its noun."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def command(*words: str) -> None:
    """A command line."""
    _print()
    _print(f"$ {' '.join(words)}", bold=True)


def output(text: str, max_lines: int | None) -> None:
    """The output of a command, or its first lines."""
    lines = text.splitlines()
    for line in lines[:max_lines]:
        _print(f"  {line}".rstrip())
    if max_lines is not None and len(lines) > max_lines:
        _print(f"  ... and {len(lines) - max_lines} more lines")


def verdict(*, good: bool, kills: int, seconds: float, url: Path) -> None:
    """The result."""
    _print()
    if good:
        _print(f"Bit-identical: {counted(kills, 'kill')} cost only time. ({seconds:.0f} s in all)", bold=True)
    else:
        _print("NOT the same: see above. This is a bug; please report it with this output.", bold=True)
    _print(f"The store is kept for you to try: {url}")


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def _print(text: str = "", *, bold: bool = False) -> None:
    print(f"\x1b[1m{text}\x1b[0m" if bold and sys.stdout.isatty() else text, flush=True)
