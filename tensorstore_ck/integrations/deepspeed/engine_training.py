"""An engine as a `TrainingState`: for the engine's own saves, and for trainers that hold one."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from tensorstore_ck.integrations.deepspeed.engine_state import PARTS, EngineState
from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.per_rank_state import PerRankState
from tensorstore_ck.training.stateful_parts import StatefulPart


def training_of(
    engine: Any, values: dict[str, Any], *, schedulers: object = None, extra: dict[str, Any] | None = None, parts: Collection[str] = PARTS
) -> tuple[TrainingState, EngineState]:
    """The state of an engine that `require_supported` has accepted, and its shared side. Save and restore it within `partitioned`.

    `values`, `schedulers` and `extra` are as for `TrainingState`; without `schedulers`, the engine's own. `parts`: what of the shared side
    there is.
    """
    extra = {} if extra is None else extra
    shared = EngineState(engine, parts, schedulers=schedulers, extra=extra)
    model, none = StatefulPart.of("model", shared.module), StatefulPart.of("dataloader", None)
    return TrainingState.over(shared, PerRankState(model=model, loaders=none, extra=extra, values=values, merge=None)), shared


@contextmanager
def partitioned(engine: Any) -> Iterator[None]:
    """ZeRO 3 may hold whole parameters between steps: they are cut meanwhile."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:
        if hasattr(optimizer, "checkpoint_event_epilogue"):
            optimizer.checkpoint_event_epilogue()
