"""The attributes that a `TrainingState` adds to each save by itself, so that snapshots can be searched by them. Waits for no device and
runs no program.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from tensorstore_ck.format.attributes import MAX_ATTRIBUTES, MAX_TEXT_CHARS, Attributes, are_attributes
from tensorstore_ck.training.sample_cursor import SampleCursor

MAX_NOTED: Final = 32
"""Half of the attributes that a snapshot may have. The other half is for metadata."""


def noted_attributes(
    *, optimizers: Mapping[str, Any], schedulers: Mapping[str, Any], loaders: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, float | str]:
    """Attributes of a training, from its objects by name; a single object has the name ''.

    ``lr``, ``lr.1`` ...: of each parameter group, if it differs from the first one's; ``scheduler_step``; ``epoch`` and ``samples_seen`` of
    a `SampleCursor`; ``extra.NAME`` of plain values; ``code_version``.
    """
    found = dict[str, float | str]()
    items = (*_loader_items(loaders), *_rates(optimizers), *_scheduler_items(schedulers), *_plain(extra))
    version = code_version()
    for name, value in items if version is None else (*items, ("code_version", version)):
        if len(found) < MAX_NOTED and are_attributes({name: value}):
            found.setdefault(name, value)
    return found


def with_noted(given: Attributes, noted: Attributes) -> dict[str, float | str]:
    """The attributes that the caller of a save gives, and as many of the noted ones as fit."""
    others = [(name, value) for name, value in noted.items() if name not in given]
    return {**dict(others[: max(0, MAX_ATTRIBUTES - len(given))]), **given}


def _rates(optimizers: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, optimizer in optimizers.items():
        rates = [_rate(group.get("lr")) for group in getattr(optimizer, "param_groups", ())]
        for number, rate in enumerate(rates):
            if rate is not None and (number == 0 or rate != rates[0]):
                yield ".".join(filter(None, ("lr", key, str(number or "")))), rate


def _rate(rate: object) -> float | None:
    if isinstance(rate, torch.Tensor):  # a rate on a GPU would have to be waited for
        return float(rate) if rate.device.type == "cpu" and rate.numel() == 1 else None
    return float(rate) if isinstance(rate, int | float) else None


def _scheduler_items(schedulers: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, scheduler in schedulers.items():
        step = getattr(scheduler, "last_epoch", None)
        if isinstance(step, int):
            yield f"scheduler_step.{key}".rstrip("."), float(step)


def _loader_items(loaders: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for cursor in loaders.values():
        if isinstance(cursor, SampleCursor):
            yield "epoch", float(cursor.epoch)
            yield "samples_seen", float(cursor.samples_seen)


def _plain(extra: Mapping[str, Any]) -> Iterator[tuple[str, float | str]]:
    for key, value in extra.items():
        is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 64)
        if is_number:
            yield f"extra.{key}", float(value)
        elif isinstance(value, str) and value.isascii() and value.isprintable() and len(value) <= MAX_TEXT_CHARS:
            yield f"extra.{key}", value


@cache
def code_version() -> str | None:
    """The commit that is checked out in the program's folder, or in the working folder if the program has no file; None without git. It is
    read at the first call; uncommitted changes are not seen.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        start = Path(file).resolve().parent if file else Path.cwd()
        top = next((folder for folder in (start, *start.parents) if (folder / ".git").exists()), None)
        return None if top is None else commit_of(top / ".git")
    except (OSError, ValueError):  # no text, or no path: after a power failure files may have zeros
        return None


def commit_of(git: Path) -> str | None:
    """The commit that ``.git`` says is checked out: a folder, or the file of a worktree or a submodule."""
    if git.is_file():
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head[:64] or None
    name, link = head.removeprefix("ref:").strip(), git / "commondir"
    common = git / link.read_text().strip() if link.exists() else git
    if (common / name).exists():
        return (common / name).read_text().strip()[:64] or None
    packed = (common / "packed-refs").read_text().splitlines() if (common / "packed-refs").exists() else []
    return next((line.partition(" ")[0] for line in packed if line.endswith(f" {name}")), None)
