"""What policies leave of a store's write rate to one job, by what the log says of the jobs that write. Pure: no clock, no store."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Final

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log.ref_table import RefTable
from tensorstore_ck.log.retention.policy import Policy

WRITING_SECONDS: Final = 900.0
"""A branch that was published or staged to within this time counts as one that writes. As many saves end within any time as begin in it, so
that these are at least as many as write now, if a save takes less than this."""


def job_rate(view: RefTable, ref: str, now_ns: int) -> float | None:
    """Bytes per second for the job that saves to `ref`, all its ranks together; None without a limit.

    Each `max_write_rate` of a policy that matches is divided by the number of writing branches that the policy matches; the lowest counts.
    """
    limits = {glob: rate for glob, rules in _rules(view) if fnmatchcase(ref, glob) and (rate := _rate(rules)) is not None}
    if not limits:
        return None
    writing = {ref, *_writing(view, now_ns - int(WRITING_SECONDS * 1e9))}
    return min(rate / sum(fnmatchcase(each, glob) for each in writing) for glob, rate in limits.items())


def _rules(view: RefTable) -> Iterator[tuple[str, object]]:
    return ((glob, row.rules["max_write_rate"]) for glob, row in view.policies().items() if "max_write_rate" in row.rules)


def _rate(rule: object) -> float | None:
    """The rate, whatever other rules the policy has; None for one that this build does not understand."""
    try:
        return Policy.of(max_write_rate=rule).max_write_rate
    except InvalidOptionError:
        return None


def _writing(view: RefTable, since_ns: int) -> Iterator[str]:
    yield from (head.name for head in view.heads() if head.time_ns >= since_ns)
    yield from (info.ref for _, info in view.all_staged() if info.arrived_ns >= since_ns)
