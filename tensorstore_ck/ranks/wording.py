"""How messages name ranks and what they said: in full for a few, as runs and counts for thousands.

Pure text. A message stays short whatever the size of the group.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

MAX_RUNS: Final = 8
MAX_SAYINGS: Final = 4
MAX_TEXT: Final = 1200


def named_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-6, 9`` or ``ranks 0, 2, 4, ... (512 in all)``; `ranks` ascend."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:MAX_RUNS]]
    more = f", ... ({len(ranks)} in all)" if len(runs) > MAX_RUNS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{more}"


def unheard(ranks: Sequence[int], seconds: float) -> str:
    """That nothing was heard of ranks, and why that may be."""
    if len(ranks) == 1:
        return f"{named_ranks(ranks)} has not been heard of for {seconds:.0f} s: it ended, was killed or suspended, or its host is gone"
    return f"{named_ranks(ranks)} have not been heard of for {seconds:.0f} s: they ended, were killed or suspended, or their hosts are gone"


def sayings(said: Mapping[int, str]) -> str:
    """What ranks said, those who said the same together: ``rank 3: NoSpaceError: ...; ranks 5-7: ...``."""
    who: dict[str, list[int]] = {}
    for rank in sorted(said):
        who.setdefault(said[rank], []).append(rank)
    shown = [f"{named_ranks(ranks)}: {text[:MAX_TEXT]}" for text, ranks in list(who.items())[:MAX_SAYINGS]]
    rest = sorted(rank for ranks in list(who.values())[MAX_SAYINGS:] for rank in ranks)
    return "; ".join([*shown, f"{named_ranks(rest)}: something else"] if rest else shown)


def disagreements(records: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """Which of `keys` have not one value in the records of all ranks (in rank order), and who says what; empty when all agree."""
    texts = []
    for key in keys:
        first = records[0].get(key)
        if any(record.get(key) != first for record in records):
            said = {rank: _shown(record.get(key)) for rank, record in enumerate(records)}
            texts.append(f"the ranks differ in {key}: {sayings(said)}")
    return "; ".join(texts)


def error_text(exc: BaseException) -> str:
    """An error in one line, for the other ranks."""
    return f"{type(exc).__name__}: {exc}"[:MAX_TEXT]


def _shown(value: object) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else repr(value)
