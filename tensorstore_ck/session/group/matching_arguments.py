"""Arguments that must be the same on all ranks; an error names the option, the ranks, and the values that differ.

Ranks send a hash of large options; if hashes differ, a few ranks report the values.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.session.group.rank_messages import MAX_GROUPS, describe_ranks, mismatches, shortened

ADVICE: Final = "pass the same on all ranks"
MAX_SHOWN: Final = 200
"""The most characters of a value."""
MAX_REPORTED: Final = 1 << 18
"""The most characters that one rank reports of its options."""
MAX_PATHS: Final = 4
NOT_REPORTED: Final = "something else"


def require_same(records: Sequence[Mapping[str, Any]], keys: Sequence[str], in_job: Sequence[int] | None = None) -> None:
    """Checks that the records of all ranks, in their order, have the same value for each of `keys`.

    Raises:
        InvalidOptionError: they differ; it lists who passed what.
    """
    for key in keys:
        problem = mismatches(records, (key,), in_job)
        if problem:
            raise InvalidOptionError(f"{problem}: {ADVICE}", object_id=key)


class Differing:
    """Options that were compared by hashes: ranks are grouped by them, and the first rank of a group reports for it."""

    def __init__(self, records: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
        """`records`: of all ranks, in order."""
        first: dict[tuple[object, ...], int] = {}
        self._like = [first.setdefault(tuple(record.get(key) for key in keys), rank) for rank, record in enumerate(records)]
        self.reporters = list(first.values())[:MAX_GROUPS] if len(first) > 1 else []
        """The ranks that report their options; none if nothing differs."""

    def error(self, reported: Mapping[int, Body], in_job: Sequence[int] | None = None) -> InvalidOptionError:
        """The error that all ranks raise. `reported`: the result of `describe_options` on each of the `reporters`."""
        known = {rank: take(record, "reported", dict) for rank, record in reported.items()}
        differing = [path for path in sorted(set().union(*known.values())) if len({options.get(path) for options in known.values()}) > 1]
        texts = []
        for path in differing[:MAX_PATHS]:
            texts_of = {like: str(options.get(path, "nothing")) for like, options in known.items()}
            values = {rank: texts_of.get(like, NOT_REPORTED) for rank, like in enumerate(self._like)}
            texts.append(f"{path}: {describe_ranks(values, in_job)}")
        if len(differing) > MAX_PATHS:
            texts.append(f"{len(differing) - MAX_PATHS} more")
        what = "; ".join(texts) or f"metadata or metrics: in the order of their keys, or after their first {MAX_REPORTED} characters"
        return InvalidOptionError(f"the ranks differ in {what}: {ADVICE}", object_id=differing[0] if differing else "metadata")


def describe_options(options: Mapping[str, object]) -> Body:
    """Every value of some options as text, by its path: ``metadata.optimizer.lr``."""
    reported: dict[str, str] = {}
    left = MAX_REPORTED
    for path, value in _leaves("", options):
        shown = repr(value)
        reported[path] = shown if len(shown) <= MAX_SHOWN else f"{shortened(shown, MAX_SHOWN)} ({len(shown)} characters)"
        left -= len(path) + len(reported[path])
        if left < 0:
            break
    return {"reported": reported}


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key in sorted(value):
            yield from _leaves(f"{path}.{key}" if path else str(key), value[key])
    elif "." in path:  # empty options have no values
        yield path, value
