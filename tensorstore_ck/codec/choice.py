"""Which mode a put takes: what the user says for it, its ref or the store; else by how slow the store is.

Encoding is worth its time where that is less than what it saves in bytes: a fast disk gets cheap codecs or none, a slow bucket strong ones.
How slow is told beside hashing, which goes at the speed of a core: when all cores are busy, with encoding or a user's work, both take
longer, and what is left is the store. Beside hashing a byte, `light` takes about 1.7 times as long and saves a tenth, `fast` 3.4 times as
long and saves a sixth to a third, `small` takes 20 to 40 times. So they go at 0.95 of the speed of `raw` or more from about 11, 13 and 75
on, and at 0.8 from 4 on.
"""

import threading
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple, cast, get_args

from tensorstore_ck.codec.encoder import Mode
from tensorstore_ck.errors import InvalidOptionError

CodecName = Literal["auto", "raw", "fast", "small"]
CodecOption = CodecName | Mapping[str, CodecName]

DeltaOption = bool | int | None

ANCHOR_EVERY: Final = 8
"""Differences over 50 steps cost about 3 % more than over 10, as measured in DESIGN.md."""
MAX_ANCHOR_EVERY: Final = 1000
LIGHT_FROM: Final = 4.0
"""So many times as long as hashing a byte must the store take for it to be given every other block encoded."""
FAST_FROM: Final = 13.0
"""And all of them."""
SMALL_FROM: Final = 75.0
"""And the strongest codecs."""
TELLING_BYTES: Final = 16 << 20
"""What must be written in one go to say how slow the store is."""
NEWEST_SHARE: Final = 0.5
"""How much the newest put counts."""


class Coding(NamedTuple):
    """How the blocks of a put are encoded."""

    mode: Mode
    anchor_every: int = 0
    """After how many snapshots a block that changes all over is stored in full again, and not as a difference; 0: always."""


class CodecChoice:
    """Of one store handle. Thread-safe."""

    def __init__(self, option: CodecOption = "auto", delta: DeltaOption = None) -> None:
        """`option`: a name, or names by globs over refs, of which the first that fits counts. `delta`: see `require_delta`.

        Raises:
            InvalidOptionError: there is no such codec.
        """
        self._delta = require_delta(delta)
        self.first_mode: Mode = "light"
        """What `auto` takes before anything was written."""
        rules = option if isinstance(option, Mapping) else {"*": option}
        self._rules = {str(glob): require_name(name) for glob, name in rules.items()}
        self._pace = 0.0
        self._lock = threading.Lock()

    def coding(self, ref: str, own: CodecName | None = None, delta: DeltaOption = None) -> Coding:
        """For a put to `ref`; `own` and `delta` are what was said for this put alone."""
        mode = self._mode(ref, own)
        wanted = delta if delta is not None else self._delta
        if wanted is None:
            wanted = mode == "small"
        return Coding(mode, 0 if mode == "raw" else ANCHOR_EVERY if wanted is True else int(wanted))

    def _mode(self, ref: str, own: CodecName | None = None) -> Mode:
        name = own if own is not None else self._name_of(ref)
        if name != "auto":
            return name
        if not self._pace:
            return self.first_mode
        return "raw" if self._pace < LIGHT_FROM else "light" if self._pace < FAST_FROM else "fast" if self._pace < SMALL_FROM else "small"

    def _name_of(self, ref: str) -> CodecName:
        for glob, name in self._rules.items():
            if fnmatchcase(ref, glob):
                return name
        return "auto"

    def note_written(self, size_bytes: int, pace: float) -> None:
        """What the store took, and how many times as long as hashing that was, byte for byte."""
        if size_bytes < TELLING_BYTES or pace <= 0:
            return
        with self._lock:
            self._pace += (pace - self._pace) * (NEWEST_SHARE if self._pace else 1)


def require_delta(delta: object) -> DeltaOption:
    """What a user says of differences to earlier snapshots: on, off, after how many of them one in full comes; or nothing.

    Raises:
        InvalidOptionError: it is none of these.
    """
    if delta is None or isinstance(delta, bool) or (isinstance(delta, int) and 0 < delta <= MAX_ANCHOR_EVERY):
        return delta
    raise InvalidOptionError(f"delta must be True, False or a number from 1 to {MAX_ANCHOR_EVERY}, not {delta!r}", object_id="delta")


def require_name(name: object) -> CodecName:
    """The name of a codec, as users give it.

    Raises:
        InvalidOptionError: it is none.
    """
    if name not in get_args(CodecName):
        raise InvalidOptionError(f"codec must be one of {', '.join(map(repr, get_args(CodecName)))}, not {name!r}", object_id="codec")
    return cast(CodecName, name)


def require_strong(name: object) -> Mode:
    """The mode that blocks are encoded anew with.

    Raises:
        InvalidOptionError: it is none, or none that makes blocks smaller.
    """
    if name not in ("fast", "small"):
        raise InvalidOptionError(f"codec must be 'fast' or 'small' to encode snapshots anew, not {name!r}", object_id="codec")
    return name
