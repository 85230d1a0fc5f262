"""Numbers in the names of files. Pure: names in, numbers out.

Training steps (``step_100.pt``, ``epoch=1-step=100.ckpt``, ``checkpoint-100``); and positions of the files of one checkpoint
(``model-00001-of-00003``, ``model_world_size_4_rank_0``), which tell the files that are missing.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

MAX_DIGITS: Final = 18
_NUMBER: Final = r"[ _=.\-]*(\d{1,18})(?!\d)"
_STEP: Final = re.compile(
    rf"(?:^|[^a-z])(?:global[ _-]?)?steps?{_NUMBER}|(?:^|\D)(\d{{1,18}})[ _-]?steps?(?![a-z]|[ _=.\-]*\d)", re.IGNORECASE
)
_ITERATION, _EPOCH, _CHECKPOINT = (
    re.compile(rf"(?:^|[^a-z]){word}{_NUMBER}", re.IGNORECASE) for word in ("iter(?:ation)?s?", "epochs?", "(?:ckpt|chkpt|checkpoint)s?")
)
_OF_RANKS: Final = re.compile(r"rank|shard|fsdp|(?:^|[^a-z])(?:[mptdz]p|zero|part|layer)[ _-]?\d|\d[ _-]?of[ _-]?\d", re.IGNORECASE)
_DIGITS: Final = re.compile(r"(\d+)")
_NUMBERED: Final = (
    re.compile(r"(?P<number>(?<!\d)\d{1,5})[-_.]of[-_.](?P<total>\d{1,5})(?!\d)", re.IGNORECASE),
    re.compile(r"world_size_(?P<total>\d{1,5})_rank_(?P<number>\d{1,5})(?!\d)"),
)
_PROGRESS: Final = re.compile(r"(?:step|iter|iteration|epoch)s?[ _=.\-]*$", re.IGNORECASE)
_OF_A_RANK: Final = re.compile(r"shard-\d{5}-")
"""Before the name of a file of torch's HuggingFaceStorageWriter: a rank may have nothing in some of the files."""


def step_in_name(name: str) -> int | None:
    """The step that a name contains after the word "step"."""
    return _after(_STEP, name)


def progress_in_names(names: Sequence[str]) -> dict[str, int]:
    """Name -> number of the iteration, epoch or checkpoint; empty if the numbers may be ranks."""
    for pattern in (_ITERATION, _EPOCH, _CHECKPOINT):
        progress = {name: number for name in names if not _OF_RANKS.search(name) and (number := _after(pattern, name)) is not None}
        numbers = sorted(progress.values())
        may_be_ranks = pattern is _CHECKPOINT and numbers == list(range(min(numbers, default=0), len(numbers) + min(numbers, default=0)))
        if len(set(numbers)) > 1 and not may_be_ranks:
            return progress
    return {}


def steps_of_names(names: Sequence[str]) -> dict[str, int | None]:
    """Name -> step, after a word such as "step" or "epoch", or as the only number that differs among the names."""
    steps: dict[str, int | None] = {}
    for name in names:
        numbers = [number for pattern in (_STEP, _ITERATION, _EPOCH, _CHECKPOINT) if (number := _after(pattern, name)) is not None]
        steps[name] = numbers[0] if numbers else None
    steps.update(_by_position([name for name, step in steps.items() if step is None]))
    return steps


def _after(pattern: re.Pattern[str], name: str) -> int | None:
    matches = list(pattern.finditer(name))
    return int(next(group for group in matches[-1].groups() if group is not None)) if matches else None


def _by_position(names: Sequence[str]) -> dict[str, int | None]:
    """The only number in a name, or the only one in which the names differ."""
    parts = {name: _DIGITS.split(name) for name in names}
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        alike.setdefault(tuple(parts[name][::2]), []).append(name)
    steps: dict[str, int | None] = {}
    for members in alike.values():
        positions = range(1, len(parts[members[0]]), 2)
        differing = [position for position in positions if len({parts[name][position] for name in members}) > 1]
        candidates = differing or list(positions)
        for name in members:
            number = parts[name][candidates[0]] if len(candidates) == 1 else ""
            steps[name] = int(number) if 0 < len(number) <= MAX_DIGITS else None
    return steps


def missing_files(names: Iterable[str]) -> tuple[str, ...]:
    """The files that `names` lack, of the sets that they belong to."""
    sets: defaultdict[tuple[str, str, int], dict[int, int]] = defaultdict(dict)
    for name in names:
        name = _OF_A_RANK.sub("", name, count=1)
        match = next((match for form in _NUMBERED if (match := form.search(name))), None)
        if match is not None and not _PROGRESS.search(name[: match.start()]):
            digits, total = match["number"], int(match["total"])
            sets[name[: match.start("number")], name[match.end("number") :], total][int(digits)] = len(digits)
    missing = []
    for (before, after, total), numbers in sets.items():
        first = 0 if 0 in numbers or "world_size_" in before else 1
        digits = max(numbers.values())
        missing += [f"{before}{number:0{digits}}{after}" for number in range(first, first + total) if number not in numbers]
    return tuple(missing)
