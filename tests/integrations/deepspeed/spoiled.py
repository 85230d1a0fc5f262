"""DeepSpeed's files, made bad."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Opens:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def changed(path: Path, change: Callable[[Any], Any]) -> None:
    """Rewrites a torch file."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def optimizer_file(tag: Path, rank: int) -> Path:
    (found,) = tag.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return found


def model_file(tag: Path, rank: int = 0) -> Path:
    """The shared one; with ZeRO 3 that of the rank."""
    shared = tag / "mp_rank_00_model_states.pt"
    return shared if shared.exists() else tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
