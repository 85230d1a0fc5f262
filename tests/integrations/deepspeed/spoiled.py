"""DeepSpeed's files, made bad."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tensorstore_ck.errors import CorruptObjectError, StoreError, UnsupportedValueError
from tensorstore_ck.integrations.importing import import_checkpoint
from tensorstore_ck.store import Store


class Bad(NamedTuple):
    """What is made bad, how, and what the refusal says."""

    kind: str
    spoil: Callable[[Path], object]
    message: str
    error: type[StoreError] = CorruptObjectError


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


def update(path: Path, **values: object) -> None:
    """Changes some of a torch file."""
    changed(path, lambda content: content.update(values))


def require_refused(store: Store, folder: Path, case: Bad) -> None:
    with pytest.raises(case.error, match=case.message):
        import_checkpoint(store, folder, ref="runs/a")
    assert store.branches() == {}


def require_not_run(store: Store, folder: Path, opened: Path) -> None:
    """`opened`: what an `Opens` in the folder would create."""
    with pytest.raises(
        (UnsupportedValueError, CorruptObjectError), match=r"io\.open|mine|loss scalers|no state of torch's|no file of torch"
    ):
        import_checkpoint(store, folder, ref="runs/a")
    assert not opened.exists()
    assert store.branches() == {}


def optimizer_file(tag: Path, rank: int) -> Path:
    (found,) = tag.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return found


def model_file(tag: Path, rank: int = 0) -> Path:
    """The shared one; with ZeRO 3 that of the rank."""
    shared = tag / "mp_rank_00_model_states.pt"
    return shared if shared.exists() else tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
