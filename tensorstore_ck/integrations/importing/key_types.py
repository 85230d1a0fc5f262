"""Which keys of dicts and sets a foreign pickle may have: types with a cheap and safe hash, and no keys that Python is slow to find.

Hashes of text and bytes are random; those of numbers and tuples can be chosen (format/hash_probes.py).
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from tensorstore_ck.format.hash_probes import RANDOM_HASHES, HashProbes, reject_slow_keys
from tensorstore_ck.integrations.importing.malformed import MalformedError

MAX_KEY_DEPTH: Final = 8
"""The depth of nested tuples, whose hash recurses."""
MAX_KEY_ITEMS: Final = 4096
"""Items in a key. A nested tuple counts each time it occurs."""

_BY_ID: Final[object] = object.__hash__
_KEY_TYPES: Final = frozenset({str, int, float, complex, bool, bytes, type(None)})


class HashCrowding:
    """Follows the keys of dicts and sets that are filled step by step."""

    def __init__(self) -> None:
        self._probes: dict[int, tuple[Any, HashProbes]] = {}
        """Container id -> the container, and its keys whose hash can be chosen."""

    def add(self, container: Any, keys: Sequence[Any]) -> int:
        """Call it before adding keys to a container. Returns the number of items in these keys.

        Raises:
            MalformedError: a key has a wrong type, or Python would take quadratic time to find them.
        """
        items = 0
        for key in keys:
            kind = type(key)
            if kind in RANDOM_HASHES:
                continue
            items += 0 if kind is float or (kind is int and key.bit_length() < 64) else _items(key)
            _, probes = self._probes.setdefault(id(container), (container, HashProbes(is_set=isinstance(container, set))))
            try:
                probes.add([hash(key)])
            except ValueError as exc:
                raise MalformedError(str(exc)) from exc
        return items


def require_cheap_keys(keys: Sequence[Any]) -> Sequence[Any]:
    """`keys`, if one dict or set may have them all. Raises `MalformedError` or `ValueError` if it may not."""
    for key in keys:
        _items(key)
    for is_set in (False, True):
        reject_slow_keys(keys, is_set=is_set)
    return keys


def _items(key: Any, depth: int = 0, left: int = MAX_KEY_ITEMS) -> int:
    """The number of items in a key. Raises `MalformedError` if it may not be a key."""
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
    is_by_id = kind.__hash__ is _BY_ID or isinstance(key, torch.Tensor)
    if kind is frozenset or is_by_id or callable(getattr(key, "build", None)) or kind.__module__ in ("torch", "numpy"):
        return 1
    raise MalformedError(f"it has a {kind.__name__} as a key, or a tuple that is nested too deep")
