"""What may be a key of a dict, or in a set, in a foreign pickle: of kinds whose hash is cheap and safe, and few of one hash.

Hashes of texts and bytes are random; those of numbers and tuples can be chosen, and a dict of keys with one hash takes quadratic time.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from tensorstore_ck.format.values import MAX_ALIKE, RANDOM_HASHES, require_unlike
from tensorstore_ck.integrations.importing.malformed import MalformedError
from tensorstore_ck.integrations.importing.placeholders import UnknownObject

MAX_KEY_DEPTH: Final = 8
"""Tuples in tuples as a key: their hash recurses."""
MAX_KEY_ITEMS: Final = 4096
"""Items in a key, those of the tuples in it included each time: a tuple may hold one tuple many times."""

_KEY_TYPES: Final = frozenset({str, int, float, complex, bool, bytes, type(None)})


class HashCrowding:
    """The keys of dicts and sets that are filled bit by bit."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[Any, Counter[int]]] = {}
        """By the id of the container: itself, and how many of its keys have one hash, of kinds where that can be chosen."""

    def add(self, container: Any, keys: Sequence[Any]) -> int:
        """Told of keys before they are put into a container; tells how many items their hashes go through.

        Raises:
            MalformedError: one may not be a key, or many have one hash.
        """
        items = 0
        for key in keys:
            kind = type(key)
            if kind in RANDOM_HASHES or (kind is int and key.bit_length() < 64):
                continue
            items += _items(key)
            _, counts = self._counts.setdefault(id(container), (container, Counter()))
            counts[hash(key)] += 1
            if counts[hash(key)] > MAX_ALIKE:
                raise MalformedError(f"it has more than {MAX_ALIKE} keys of one hash in one dict or set")
        return items


def require_cheap_keys(keys: Sequence[Any]) -> Sequence[Any]:
    """`keys`, if they may all be keys of one dict.

    Raises:
        MalformedError, ValueError: they may not.
    """
    for key in keys:
        _items(key)
    require_unlike(keys)
    return keys


def _items(key: Any, depth: int = 0, left: int = MAX_KEY_ITEMS) -> int:
    """How many items a key has.

    Raises:
        MalformedError: it may not be one.
    """
    kind = type(key)
    if kind in _KEY_TYPES:
        return 1
    if isinstance(key, tuple) and depth < MAX_KEY_DEPTH:
        items = 1
        for item in key:
            items += _items(item, depth + 1, left - items)
            if items > left:
                raise MalformedError(f"it has a key of more than {MAX_KEY_ITEMS} items")
        return items
    if (
        kind is frozenset
        or isinstance(key, UnknownObject)
        or callable(getattr(key, "build", None))
        or kind.__module__ in ("torch", "numpy")
    ):
        return 1
    raise MalformedError(f"it has a {kind.__name__} as a key, or too deep a one")
