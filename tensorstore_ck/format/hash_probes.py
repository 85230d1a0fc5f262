"""How long Python looks for places in a dict or set. An attacker can choose numbers that take quadratic time.

A dict and a set find a place for a key by a sequence of slots that follows from its hash, until one is free. Numbers and tuples can be
chosen so that their hashes are equal, or lead through the same filled slots. So the tables are filled here first, without keys, and
given up early.
"""

from collections.abc import Iterable, Sequence
from math import isqrt
from typing import Final

RANDOM_HASHES: Final = frozenset({str, bytes, bool, type(None)})
"""Types whose hashes are salted, or few."""
MAX_PROBES_A_KEY: Final = 30
"""On average, in a dict. Random keys take 2; multiples of a large power of 2 take 20."""
MAX_PROBES_AN_ELEMENT: Final = 250
"""The same in a set, which also looks at the slots next to each one."""
FREE_PROBES: Final = 20_000
FEW_KEYS: Final = isqrt(FREE_PROBES)
"""Up to this number even keys that all collide take little time, and need no check."""
LINEAR_PROBES_OF_SETS: Final = 9
_HASH_BITS: Final = (1 << 64) - 1
_MIN_SLOTS: Final = 8


class HashProbes:
    """The table of one dict or set, by hashes alone."""

    def __init__(self, *, is_set: bool) -> None:
        self._linear = LINEAR_PROBES_OF_SETS if is_set else 0
        self._growth, self._load, self._most = (4, 0.6, MAX_PROBES_AN_ELEMENT) if is_set else (2, 2 / 3, MAX_PROBES_A_KEY)
        self._hashes: list[int] = []
        self._slots = bytearray(_MIN_SLOTS)
        self._probes = 0

    def add(self, hashes: Iterable[int]) -> None:
        """Adds keys.

        Raises:
            ValueError: they would take too long.
        """
        for number in hashes:
            self._hashes.append(number)
            if len(self._hashes) > len(self._slots) * self._load:
                self._slots = bytearray(self._growth * len(self._slots))
                for earlier in self._hashes:
                    self._place(earlier)
            else:
                self._place(number)

    def _place(self, number: int) -> None:
        slots, linear = self._slots, self._linear
        mask = len(slots) - 1
        perturb = number & _HASH_BITS
        at = perturb & mask
        probes = 0
        limit = self._most * len(self._hashes) + FREE_PROBES - self._probes
        while slots[at]:
            probes += 1
            if linear and at + linear <= mask:
                free = slots.find(0, at + 1, at + 1 + linear)
                probes += linear if free < 0 else free - at
                if free >= 0:
                    at = free
                    break
            perturb >>= 5
            at = (at * 5 + perturb + 1) & mask
            if probes > limit:
                raise ValueError(
                    f"{len(self._hashes):,} keys of a dict or set have the same hash, or lead Python through the same slots of its table: "
                    "they would take quadratic time"
                )
        self._probes += probes
        slots[at] = 1


def reject_slow_keys(keys: Sequence[object], *, is_set: bool) -> None:
    """Rejects keys that Python would take quadratic time to put into a dict or set.

    Raises:
        ValueError: it would.
        TypeError: a key is not hashable.
    """
    if len(keys) <= FEW_KEYS:
        return
    chosen = [key for key in keys if type(key) not in RANDOM_HASHES]
    if len(chosen) > FEW_KEYS and not _are_consecutive(chosen):
        HashProbes(is_set=is_set).add(map(hash, chosen))


def fault_of(keys: Sequence[object], *, is_set: bool) -> str:
    """Why a reader would reject keys, which it gets in this order; empty if it would not."""
    try:
        reject_slow_keys(keys, is_set=is_set)
    except ValueError as exc:
        return str(exc)
    return ""


def _are_consecutive(keys: Sequence[object]) -> bool:
    """Whether the keys are integers in a row, so that each has a slot of its own."""
    first = keys[0]
    return type(first) is int and type(keys[-1]) is int and all(type(key) is int and key == first + at for at, key in enumerate(keys))
