"""Which known names a user may have meant. Takes no longer for a store with millions of names, which anybody who saves can make."""

import difflib
import heapq
from collections.abc import Iterable
from typing import Final

MAX_COMPARED: Final = 300
MAX_CHARS: Final = 64
"""A comparison takes up to the square of this."""


def similar_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Known names that are spelled like `name`, the closest first. Of many, those of about its length and characters are compared."""
    chars = set(name)
    nearest = heapq.nsmallest(MAX_COMPARED, known, key=lambda each: abs(len(each) - len(name)) + len(chars.symmetric_difference(each)))
    whole = {each[:MAX_CHARS]: each for each in reversed(nearest)}
    return [whole[each] for each in difflib.get_close_matches(name[:MAX_CHARS], whole, most)]
