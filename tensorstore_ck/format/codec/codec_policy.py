"""Which mode a put takes: what the user says for it, its ref or the store; else `auto`.

`auto` stores blocks as they are, unless each of the last puts of this handle has shown that the store is so slow that encoding makes
puts and restores faster. Puts are timed; restores follow from them. `fast` encodes at 0.7 to 1.1 GB/s and decodes at 1.3 to 1.5 GB/s on a
core, hashing counted, and saves a sixth to a third of the bytes. From an S3 server on the same host, restores were 4 to 6 times as fast
as puts. At `SLOW_PACE` a put passes 60 to 90 MB/s on each core, so a restore may pass 500 MB/s, and decoding still keeps up with it.

How slow is expressed in the time that hashing takes: when all cores are busy, with a user's work or with a server on the same host,
hashing and writing both take longer, and their ratio says what the store alone is like. On 2 cores it was 12 to 29 for S3 servers on the
same host, which the cores limit, and 22, 55, 110 and 200 for stores that take 500, 200, 100 and 50 MB/s.
"""

from collections import deque
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple, cast, get_args

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.codec.encoder import Mode

CodecName = Literal["auto", "raw", "fast", "small"]
CodecOption = CodecName | Mapping[str, CodecName]

DeltaOption = bool | int | None

ANCHOR_EVERY: Final = 8
"""Differences over 50 steps cost about 3 % more than over 10: docs/decisions/009-bounded-delta-chains.md."""
MAX_ANCHOR_EVERY: Final = 1000
SLOW_PACE: Final = 60.0
"""A store is slow whose writes take this many times as long as hashing the same number of bytes."""
JUDGED_BYTES: Final = 16 << 20
"""A put that writes fewer bytes says nothing about the store."""
JUDGED_PUTS: Final = 3
"""A store is slow when all of the last puts say so, up to this many: one slow put does not outweigh two fast ones."""


class Coding(NamedTuple):
    """How the blocks of a put are encoded."""

    mode: Mode
    anchor_every: int = 0
    """After how many snapshots a block that changes all over is stored in full again, and not as a difference; 0: always."""


class CodecPolicy:
    """Of one store handle. Thread-safe."""

    def __init__(self, option: CodecOption = "auto", delta: DeltaOption = None) -> None:
        """`option`: a name, or names by globs over refs, of which the first that fits counts. `delta`: see `check_delta`.

        Raises:
            InvalidOptionError: there is no such codec.
        """
        self._delta = check_delta(delta)
        rules = option if isinstance(option, Mapping) else {"*": option}
        self._rules = {str(glob): check_codec_name(name) for glob, name in rules.items()}
        self._paces: deque[float] = deque(maxlen=JUDGED_PUTS)

    def coding(self, ref: str, own: CodecName | None = None, delta: DeltaOption = None) -> Coding:
        """For a put to `ref`; `own` and `delta` are what was said for this put alone. Who asks for differences asks for fewer bytes."""
        name = own if own is not None else self._name_of(ref)
        wanted = delta if delta is not None else self._delta
        mode = name if name != "auto" else "fast" if wanted or self._is_slow() else "raw"
        if wanted is None:
            wanted = mode == "small"
        return Coding(mode, 0 if mode == "raw" else ANCHOR_EVERY if wanted is True else int(wanted))

    def note_written(self, size_bytes: int, pace: float) -> None:
        """A put wrote so many bytes, which took `pace` times as long as hashing the same number."""
        if size_bytes >= JUDGED_BYTES and pace > 0:
            self._paces.append(pace)

    def _is_slow(self) -> bool:
        return min(self._paces.copy(), default=0.0) >= SLOW_PACE

    def _name_of(self, ref: str) -> CodecName:
        for glob, name in self._rules.items():
            if fnmatchcase(ref, glob):
                return name
        return "auto"


def check_delta(delta: object) -> DeltaOption:
    """What a user says of differences to earlier snapshots: on, off, after how many of them one in full comes; or nothing.

    Raises:
        InvalidOptionError: it is none of these.
    """
    if delta is None or isinstance(delta, bool) or (isinstance(delta, int) and 0 < delta <= MAX_ANCHOR_EVERY):
        return delta
    raise InvalidOptionError(f"delta must be True, False or a number from 1 to {MAX_ANCHOR_EVERY}, not {delta!r}", object_id="delta")


def check_codec_name(name: object) -> CodecName:
    """The name of a codec, as users give it.

    Raises:
        InvalidOptionError: it is none.
    """
    if name not in get_args(CodecName):
        raise InvalidOptionError(f"codec must be one of {', '.join(map(repr, get_args(CodecName)))}, not {name!r}", object_id="codec")
    return cast(CodecName, name)


def check_recode_mode(name: object) -> Mode:
    """The mode that blocks are encoded anew with.

    Raises:
        InvalidOptionError: it is none, or none that makes blocks smaller.
    """
    if name not in ("fast", "small"):
        raise InvalidOptionError(f"codec must be 'fast' or 'small' to encode snapshots anew, not {name!r}", object_id="codec")
    return name
