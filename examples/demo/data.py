"""The text, and a shuffling loader that can resume in the middle of an epoch. Knows no snapshots."""

import random
import sysconfig
from pathlib import Path

import torch


def read_corpus(limit_bytes: int) -> torch.Tensor:
    """The beginning of the sources of Python's own standard library, one token per byte."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8).long()


class ShufflingLoader:
    """Endless batches of windows, reshuffled every epoch; Python's `random` chooses the start in each window."""

    def __init__(self, corpus: torch.Tensor, *, batch: int, context: int, seed: int) -> None:
        self._corpus, self._batch, self._context, self._seed = corpus, batch, context, seed
        self._windows = len(corpus) // context - 1
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = torch.randperm(self._windows, generator=torch.Generator().manual_seed(self._seed + epoch)).tolist()

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, both (batch, context)."""
        if self._position + self._batch > self._windows:
            self._start_epoch(self._epoch + 1)
        windows = self._order[self._position : self._position + self._batch]
        self._position += self._batch
        starts = [window * self._context + random.randrange(self._context) for window in windows]  # noqa: S311
        rows = torch.stack([self._corpus[start : start + self._context + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """The position: the order of an epoch follows from its number."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from `state`."""
        self._start_epoch(state["epoch"])
        self._position = state["position"]
