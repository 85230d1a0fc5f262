"""What a user adds to a state comes back as it was saved, whatever the script holds when it restores, and in the objects that it holds."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.training import TrainingState


class Phase(Enum):
    WARM_UP = "warm-up"
    MAIN = "main"


@dataclass
class Progress:
    seen: int = 0
    phase: Phase = Phase.WARM_UP
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Best:
    step: int


def test_any_form_at_any_time(store: tsck.Store) -> None:
    """Buffers that grow, and what is there later or no longer: for a fresh run, and for a rollback of the one that goes on."""
    early: Callable[[], dict[str, Any]] = lambda: {  # noqa: E731
        "replay": [torch.zeros(2)],
        "best": None,
        "seen": torch.zeros(0),
        "errors": np.zeros(1),
        "named": {"a": torch.zeros(2), "n": 1},
        "gone": torch.zeros(2),
    }
    late = {
        "replay": [torch.ones(2), torch.ones(3)],
        "best": {"w": torch.ones(2)},
        "seen": torch.ones(4, dtype=torch.int64),
        "errors": np.ones(3),
        "named": {"b": torch.ones(1)},
        "gone": None,
    }
    extra = early()
    training = TrainingState(extra=extra)
    training.put(store, ref="runs/job", step=1)
    extra.update(late)
    training.put(store, ref="runs/job", step=2)
    for held in (early(), extra):
        for step, expected in ((2, late), (1, early()), (2, late)):
            TrainingState(extra=held).restore(store, f"runs/job@{step}")
            assert repr(held) == repr(expected)


@pytest.mark.parametrize("argument", ["extra", "rank_values"])
def test_classes_and_containers_of_the_script(store: tsck.Store, argument: str) -> None:
    def made() -> dict[str, Any]:
        return {
            "progress": Progress(),
            "history": [Progress()],
            "phase": Phase.WARM_UP,
            "best": Best(0),
            "recent": deque([0.5], maxlen=3),
            "done": {1},
            "counts": Counter(a=1),
            "notes": SimpleNamespace(tokens=1),
            "weights": torch.zeros(2),
        }

    saved = made()
    training = TrainingState(**{argument: saved})  # type: ignore[arg-type]
    progress = saved["progress"]
    progress.seen, progress.phase = 7, Phase.MAIN
    progress.losses.append(1.5)
    saved["history"].append(Progress(3))
    saved["phase"], saved["best"] = Phase.MAIN, Best(9)
    saved["recent"] += [1.0, 2.0, 3.0]
    saved["done"].add(2)
    saved["counts"]["a"] += 4
    saved["notes"].tokens = 100
    saved["weights"] += 1
    training.put(store, ref="runs/job", step=1)
    fresh = made()
    held = dict(fresh)
    TrainingState(**{argument: fresh}).restore(store, "runs/job")  # type: ignore[arg-type]
    assert repr(fresh) == repr(saved)
    assert {name for name in fresh if fresh[name] is held[name]} == {"history", "recent", "done", "counts", "weights"}
    assert fresh["phase"] is Phase.MAIN
    assert held["notes"] == SimpleNamespace(tokens=1), "parsed arguments are those of this run"


def test_expanded_tensors_and_records_without_values(store: tsck.Store) -> None:
    @dataclass
    class Log:
        lines: list[str] = field(default_factory=list)

    values: dict[str, Any] = {"log": Log(), "mean": torch.ones(1).expand(3)}
    training = TrainingState(rank_values=values)
    training.put(store, ref="runs/job")
    training.restore(store, "runs/job")
    assert (values["log"], values["mean"].tolist()) == (Log(), [1.0, 1.0, 1.0])
