"""Numbered files of one checkpoint, by name (``model-00001-of-00003``, ``model_world_size_4_rank_0``), and which of them are missing."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

_NUMBERED: Final = (
    re.compile(r"(?P<number>(?<!\d)\d{1,5})[-_.]of[-_.](?P<total>\d{1,5})(?!\d)", re.IGNORECASE),
    re.compile(r"world_size_(?P<total>\d{1,5})_rank_(?P<number>\d{1,5})(?!\d)"),
)
_PROGRESS: Final = re.compile(r"(?:step|iter|iteration|epoch)s?[ _=.\-]*$", re.IGNORECASE)
_OF_A_RANK: Final = re.compile(r"shard-\d{5}-")
"""Before the name of a file of torch's HuggingFaceStorageWriter: a rank may have nothing in some of the files."""


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
