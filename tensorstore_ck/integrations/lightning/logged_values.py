"""Values that were logged since the start of the epoch, and the newest ones. Lightning loses them: after a resume its means over an epoch
cover only the rest of it, and schedules and early stopping that watch a value do not find it.
"""

import sys
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

State = dict[str, Any]
NEWEST: Final = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
PLAIN: Final = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx")
STATES: Final = ("value", "cumulated_batch_size", "_forward_cache", "has_reset", "_update_count")


def capture(trainer: Any) -> State:
    """The state that `restore` needs."""
    connector = trainer._logger_connector
    return {
        "newest": {name: dict(getattr(connector, name)) for name in NEWEST},
        "hook": connector._current_fx,
        "epoch": [
            _logged(result)
            for result in trainer.fit_loop.epoch_loop._results.values()
            if result.is_tensor and result.meta.sync._group is None
        ],
        "metrics": {
            name: {"states": dict(metric.metric_state), "updates": metric._update_count}
            for name, metric in _metrics(trainer.lightning_module)
        },
    }


def restore(trainer: Any, stored: State, *, within_epoch: bool) -> None:
    """Restores it before the loop goes on."""
    connector = trainer._logger_connector
    for name, values in stored["newest"].items():
        setattr(connector, name, dict(values))
    if not within_epoch:
        return
    connector._first_loop_iter, connector._current_fx = False, stored["hook"]
    results = trainer.fit_loop.epoch_loop._results
    for saved in stored["epoch"]:
        results[saved["key"]] = _result(trainer, results, saved)
    metrics = dict(_metrics(trainer.lightning_module))
    for name, saved in stored["metrics"].items():
        if name in metrics:
            for attribute, value in saved["states"].items():
                device = metrics[name].device
                setattr(metrics[name], attribute, [item.to(device) for item in value] if isinstance(value, list) else value.to(device))
            metrics[name]._update_count, metrics[name]._computed = saved["updates"], None


def _logged(result: Any) -> State:
    meta = result.meta
    suffix = f".{meta.dataloader_idx}" if meta.add_dataloader_idx and meta.dataloader_idx is not None else ""
    return {
        "key": f"{meta.fx.removesuffix(suffix)}.{meta.name}{suffix}",
        "meta": {name: getattr(meta, name) for name in PLAIN} | {"metric_attribute": meta.metric_attribute},
        "reduce": meta.reduce_fx.__name__,
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "states": {name: getattr(result, name) for name in STATES if hasattr(result, name)},
    }


def _result(trainer: Any, results: Any, stored: State) -> Any:
    """The logged value as Lightning would have registered it."""
    kinds: Any = sys.modules[type(results).__module__]
    meta = kinds._Metadata(**stored["meta"], reduce_fx=stored["reduce"])
    should, rank_zero_only = stored["sync"]
    meta.sync = kinds._Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    result = kinds._ResultMetric(meta, is_tensor=True)
    for name, value in stored["states"].items():
        setattr(result, name, value)
    return result.to(trainer.strategy.root_device)


def _metrics(module: nn.Module) -> Iterator[tuple[str, Any]]:
    from torchmetrics import Metric  # noqa: PLC0415 - a dependency of Lightning, loaded by it

    return ((name, metric) for name, metric in module.named_modules() if isinstance(metric, Metric))
