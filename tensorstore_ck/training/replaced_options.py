"""Which options of optimizers a restore replaced: torch restores those of the saved run, whatever the script has set. Changes nothing."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tensorstore_ck.training.noted_attributes import rate_of

_OPTIONS: Final = ("betas", "momentum", "weight_decay", "eps")

Options = dict[str, object]
"""Name, such as ``optimizer.lr`` -> value."""


def options_of(optimizers: Mapping[str, Any]) -> Options:
    """The options of the optimizers, by path: of learning rates the initial one, as far as a scheduler has noted it."""
    return {name: value for path, optimizer in optimizers.items() for name, value in _items(path, optimizer) if value is not None}


def describe_replaced(before: Options, after: Options) -> str:
    """The options that differ, for people; empty if none does."""
    changed = [name for name, value in after.items() if name in before and before[name] != value]
    return ", ".join(f"{name} is {after[name]}, not {before[name]}" for name in changed)


def _items(path: str, optimizer: Any) -> Iterator[tuple[str, object]]:
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        name = f"{path}.{number}" if number else path
        yield f"{name}.lr", rate_of(group.get("initial_lr", group.get("lr")))
        for option in _OPTIONS:
            value = group.get(option)
            yield f"{name}.{option}", value if isinstance(value, int | float | tuple) else None
