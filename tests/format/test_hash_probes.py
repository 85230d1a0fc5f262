"""Keys that make Python look long for a place: each worst input is refused after a bounded number of steps, and true keys are not."""

import random
from collections.abc import Callable

import pytest

from tensorstore_ck.format.hash_probes import FREE_PROBES, MAX_PROBES_AN_ELEMENT, HashProbes, reject_slow_keys

PRIME = (1 << 61) - 1
"""Python's hash of an int is its rest by this."""


def chain(bits: int, after: Callable[[int, int], int]) -> list[int]:
    """Half of the keys fill the slots that follow from 1 in a table of that size; the others begin where these do."""
    mask, slots, at = (1 << bits) - 1, list[int](), 1
    for _ in range((1 << bits) // 3):
        slots.append(at)
        at = after(at, mask)
    return slots + [((number + 1) << bits) | slots[number % 16] for number in range((1 << bits) // 3 - 10)]


def of_dicts(at: int, mask: int) -> int:
    return (5 * at + 1) & mask


WORST: dict[str, tuple[list[object], bool]] = {
    "one hash": ([PRIME * number for number in range(1, 900)], False),
    "one hash in a set": ([PRIME * number for number in range(1, 900)], True),
    "one chain of slots": (list(chain(14, of_dicts)), False),
    "the same as floats": ([float(number) for number in chain(14, of_dicts)], False),
    "tuples of one hash": ([(PRIME * number,) for number in range(1, 900)], False),
}
TRUE: dict[str, list[object]] = {
    "in a row": list(range(100_000)),
    "steps": list(range(0, 3_000_000, 500)),
    "random": [random.Random(number).getrandbits(60) for number in range(3000)],
    "large powers": [number << 40 for number in range(3000)],
    "fractions": [number / 7 for number in range(3000)],
    "pairs": [(number, number + 1) for number in range(3000)],
    "names": [f"layer.{number}" for number in range(3000)],
}


@pytest.mark.parametrize("kind", WORST)
def test_chosen_keys_are_refused_early(kind: str) -> None:
    keys, is_set = WORST[kind]
    with pytest.raises(ValueError, match="quadratic time"):
        reject_slow_keys(keys, is_set=is_set)
    probes = HashProbes(is_set=is_set)
    with pytest.raises(ValueError, match="quadratic time"):
        probes.add(map(hash, keys))
    assert probes._probes <= MAX_PROBES_AN_ELEMENT * len(keys) + FREE_PROBES


@pytest.mark.parametrize("kind", TRUE)
def test_true_keys_are_taken(kind: str) -> None:
    for is_set in (False, True):
        reject_slow_keys(TRUE[kind], is_set=is_set)
