"""The DeepSpeed engine that a trainer may hold. DeepSpeed is imported only where there is one."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tensorstore_ck.training import TrainingState


def require_supported(engine: Any) -> None:
    """See `tensorstore_ck.integrations.deepspeed.compatibility.require_supported`; None: there is no engine."""
    if engine is not None:
        from tensorstore_ck.integrations.deepspeed import compatibility  # noqa: PLC0415

        compatibility.require_supported(engine)


def partitioned(engine: Any) -> AbstractContextManager[None]:
    """Within it the state of the engine is saved or restored; None: there is none."""
    if engine is None:
        return nullcontext()
    from tensorstore_ck.integrations.deepspeed import engine_state  # noqa: PLC0415

    return engine_state.partitioned(engine)


def training_of(
    engine: Any, values: dict[str, Any], *, schedulers: object, extra: dict[str, Any], parts: Collection[str] | None = None
) -> TrainingState:
    """The state of an engine; see `tensorstore_ck.integrations.deepspeed.engine_state.training_of`."""
    from tensorstore_ck.integrations.deepspeed import engine_state  # noqa: PLC0415

    parts = engine_state.PARTS if parts is None else parts
    return engine_state.training_of(engine, values, schedulers=schedulers, extra=extra, parts=parts)[0]
