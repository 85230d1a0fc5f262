"""How far tests go that could go on for ever, how long they wait for what must come, and what each suite may take."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

SOAK: Final = bool(os.environ.get("SOAK"))

PATIENCE_SECONDS: Final = 120.0
"""How long a test waits for what must come before it says that it does not: no measure of how fast the machine is."""

BUDGET_MINUTES: Final = {"core": 5, "faults": 10, "ranks": 4, "trainers": 6, "ui": 2, "docs": 2}
"""What each suite may take on two quiet cores; the table in CONTRIBUTING.md has them too."""

_SLOW_SUITES: Final = {
    "tests/docs/": "docs",
    "tests/ui/": "ui",
    "tests/session/": "ranks",
    "tests/state/": "ranks",
    "tests/training/": "trainers",
    "tests/integrations/": "trainers",
}
"""By the beginning of a test's id; the other slow ones are `faults`."""


def effort(usual: T, soak: T) -> T:
    """One or, in `make soak`, the other."""
    return soak if SOAK else usual


def in_turns(cases: Iterable[int], variants: Sequence[T]) -> Iterator[tuple[int, T]]:
    """Each case of an enumeration with one of the variants, which take turns; with all of them in `make soak`."""
    for case in cases:
        for variant in effort([variants[case % len(variants)]], variants):
            yield case, variant


def suite_of(nodeid: str, *, is_slow: bool) -> str:
    """The suite that a test belongs to."""
    if not is_slow:
        return "core"
    return next((suite for beginning, suite in _SLOW_SUITES.items() if nodeid.startswith(beginning)), "faults")
