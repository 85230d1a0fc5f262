"""Rules of a policy as text: `tsck policy set 'runs/*' keep_last=5 keep_best=3:val_loss:min`. Pure."""

import re
from typing import Final

_WHOLE: Final = re.compile(r"\s*-?[0-9]{1,18}\s*")
_BESTS: Final = re.compile(r"[^:,]+:[^,]+:(min|max)(,[^:,]+:[^,]+:(min|max))*")


def parse_rule(name: str, text: str) -> object:
    """The value for `Store.set_policy`. Returns text that does not parse unchanged; `set_policy` rejects it."""
    if name in ("keep_last", "keep_every", "keep_epochs"):
        return _number(text)
    if name == "keep_steps":
        return [_number(step) for step in text.split(",")]
    if name == "keep_triggers":
        return text.split(",")
    if name == "keep_milestones":
        return {"yes": None, "true": None, "no": False, "false": False}.get(text.lower(), text)
    if name == "keep_best":
        return [_best(item) for item in text.split(",")] if _BESTS.fullmatch(text) else text
    if name == "move_after":
        stages = [tuple(item.split(":", 1)) for item in text.split(",")]
        return stages if all(len(stage) == 2 for stage in stages) else text
    if name == "keep_first":
        return {"yes": True, "true": True, "no": None, "false": None}.get(text.lower(), text)
    return text


def _number(text: str) -> object:
    return int(text) if _WHOLE.fullmatch(text) else text


def _best(text: str) -> tuple[object, ...]:
    count, _, rest = text.partition(":")
    metric, _, direction = rest.rpartition(":")
    return (_number(count), metric, direction)
