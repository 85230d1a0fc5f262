"""When ranks and jobs begin to write to a store, so that not all of them begin at once. Pure."""

import math
import zlib

from tensorstore_ck.errors import InvalidOptionError


def stagger_delay(window_seconds: float, ref: str, rank: int, ranks: int) -> float:
    """Seconds until a rank begins: ranks are spread evenly over the window, and jobs shifted against each other by their ref."""
    return window_seconds * ((rank / ranks + zlib.crc32(ref.encode()) / (1 << 32)) % 1)


def require_stagger(window_seconds: float, *, is_staged: bool) -> None:
    """Checks `stagger_seconds` of `open`.

    Raises:
        InvalidOptionError: negative or not finite; or there is a staging disk, whose uploads have an option of their own.
    """
    if not 0 <= window_seconds < math.inf:
        raise InvalidOptionError(f"stagger_seconds must be 0 or more, not {window_seconds}", object_id="stagger_seconds")
    if window_seconds and is_staged:
        raise InvalidOptionError(
            "stagger_seconds= of open is for saves that write to the store directly: with a staging disk, pass "
            "staging=tsck.Staging(path, stagger_seconds=...)",
            object_id="stagger_seconds",
        )
