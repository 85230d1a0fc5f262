"""How messages name ranks and what they report: in full for a few, as runs and counts for thousands.

A message stays short whatever the size of the group: lists of ranks and of names are cut, and long texts lose their middle, since they
begin with what happened and end with what to do.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

MAX_RUNS: Final = 8
MAX_GROUPS: Final = 4
DIFFER: Final = "the ranks differ in"
MAX_TEXT: Final = 4096
"""The most characters of one rank's text."""
MAX_TOTAL: Final = 8192
"""The most characters that are shown of the texts of several ranks."""
_CUT: Final = " [...] "


class Verbatim(str):
    """A string that is shown without quotes."""


def named_ranks(ranks: Iterable[int], in_job: Sequence[int] | None = None) -> str:
    """``rank 3``, ``ranks 0-6, 9`` or ``ranks 0, 2, 4, ... (512 in all)``.

    `in_job`: the job's rank (`torch.distributed.get_rank`) of each rank of the group, if these differ: messages name the job's ranks.
    """
    numbers = sorted(ranks if in_job is None else (in_job[rank] if rank < len(in_job) else rank for rank in ranks))
    runs: list[list[int]] = []
    for rank in numbers:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:MAX_RUNS]]
    more = f", ... ({len(numbers)} in all)" if len(runs) > MAX_RUNS else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(shown)}{more}"


def in_the_job(in_job: Sequence[int] | None) -> str:
    """A note for a message that names the group's ranks; empty if these are the job's."""
    if in_job is None or [*in_job] == [*range(len(in_job))]:
        return ""
    return f" (these are the group's numbers: its ranks 0 to {len(in_job) - 1} are {named_ranks(range(len(in_job)), in_job)} of the job)"


def unheard(ranks: Sequence[int], seconds: float, in_job: Sequence[int] | None = None) -> str:
    """A message about silent ranks, with possible reasons."""
    who, silence = named_ranks(ranks, in_job), f"not been heard of for {seconds:.0f} s"
    if len(ranks) == 1:
        return f"{who} has {silence}: it ended, closed its store, was killed or suspended, or its host is gone"
    return f"{who} have {silence}: they ended, closed their store, were killed or suspended, or their hosts are gone"


def describe_ranks(texts: Mapping[int, str], in_job: Sequence[int] | None = None) -> str:
    """The texts of ranks, grouped by equal texts: ``rank 3: NoSpaceError: ...; ranks 5-7: ...``."""
    who: dict[str, list[int]] = {}
    for rank in sorted(texts):
        who.setdefault(texts[rank], []).append(rank)
    first, others = list(who.items())[:MAX_GROUPS], list(who.items())[MAX_GROUPS:]
    shown = [f"{named_ranks(ranks, in_job)}: {shortened(text, MAX_TOTAL // len(first))}" for text, ranks in first]
    rest = [rank for _, ranks in others for rank in ranks]
    return "; ".join([*shown, f"{named_ranks(rest, in_job)}: something else"] if rest else shown)


def mismatches(records: Sequence[Mapping[str, Any]], keys: Sequence[str], in_job: Sequence[int] | None = None) -> str:
    """The `keys` whose values differ between the records of all ranks (in rank order), and which ranks have which value."""
    texts = []
    for key in keys:
        first = records[0].get(key)
        if any(record.get(key) != first for record in records):
            values = {rank: _shown(record.get(key)) for rank, record in enumerate(records)}
            texts.append(f"{DIFFER} {key}: {describe_ranks(values, in_job)}")
    return "; ".join(texts)


def error_text(exc: BaseException) -> str:
    """An error as text, for the other ranks."""
    return shortened(f"{type(exc).__name__}: {exc}", MAX_TEXT)


def shortened(text: str, limit: int) -> str:
    """The text without its middle, at most `limit` characters."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return text[: limit - end - len(_CUT)] + _CUT + text[-end:]


def _shown(value: object) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else value if isinstance(value, Verbatim) else repr(value)
