"""Chooses the encoding mode of a save: the user's option for the save, its ref or the store; else `auto`.

`auto` stores blocks unencoded unless the last saves through this handle all showed that the store is so slow that encoding speeds up
saves and restores. Only saves are timed. `fast` encodes at 0.7 to 1.1 GB/s and decodes at 1.3 to 1.5 GB/s per core, including hashing,
and saves a sixth to a third of the bytes. From an S3 server on the same host, restores were 4 to 6 times as fast as saves. At
`SLOW_PACE` a save writes 60 to 90 MB/s per core, so a restore may read 500 MB/s, and decoding still keeps up.

The measure is the time to write a byte divided by the time to hash it: busy cores slow both, so the ratio describes the store alone. On
2 cores it was 12 to 29 for S3 servers on the same host, which the cores limit, and 22, 55, 110 and 200 for stores that accept 500, 200,
100 and 50 MB/s.
"""

from collections import deque
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple, TypeVar, cast, get_args

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.codec.encoder import Mode

T = TypeVar("T")

CodecName = Literal["auto", "raw", "fast", "small"]
CodecOption = CodecName | Mapping[str, CodecName]

DeltaOption = bool | int | None
DeltaRules = DeltaOption | Mapping[str, DeltaOption]

FULL_EVERY: Final = 8
"""Differences over 50 steps are about 3 % larger than over 10: docs/decisions/009-bounded-delta-chains.md."""
MAX_FULL_EVERY: Final = 1000
SLOW_PACE: Final = 60.0
"""A store is slow if writing takes this many times as long as hashing the same bytes."""
JUDGED_BYTES: Final = 16 << 20
"""A save that writes fewer bytes is not counted."""
JUDGED_PUTS: Final = 3
"""A store is slow if all of the last saves, up to this number, were slow: one slow save does not outweigh two fast ones."""


class Coding(NamedTuple):
    """How the blocks of a save are encoded."""

    mode: Mode
    full_every: int = 0
    """A block that changes in every snapshot is stored in full every `full_every` snapshots, else as a difference; 0: always in full."""


class CodecPolicy:
    """The codec options and measurements of one store handle. Thread-safe."""

    def __init__(self, option: CodecOption = "auto", delta: DeltaRules = None) -> None:
        """`option`: a codec name, or names by globs over refs (the first match counts). `delta`: see `check_delta`; also by globs.

        Raises:
            InvalidOptionError: an option is invalid.
        """
        deltas = delta if isinstance(delta, Mapping) else {"*": delta}
        self._deltas = {str(glob): check_delta(wanted) for glob, wanted in deltas.items()}
        rules = option if isinstance(option, Mapping) else {"*": option}
        self._rules = {str(glob): check_codec_name(name) for glob, name in rules.items()}
        self._paces: deque[float] = deque(maxlen=JUDGED_PUTS)

    def coding(self, ref: str, own: CodecName | None = None, delta: DeltaOption = None) -> Coding:
        """The coding of a save to `ref`; `own` and `delta` are the save's own options. With differences, `auto` means `fast`."""
        name = own if own is not None else _first_match(self._rules, ref) or "auto"
        wanted = delta if delta is not None else _first_match(self._deltas, ref)
        is_slow = min(self._paces.copy(), default=0.0) >= SLOW_PACE
        mode = name if name != "auto" else "fast" if wanted or is_slow else "raw"
        if wanted is None:
            wanted = mode == "small"
        return Coding(mode, 0 if mode == "raw" else FULL_EVERY if wanted is True else int(wanted))

    def note_written(self, size_bytes: int, pace: float) -> None:
        """Notes that a save wrote `size_bytes` bytes, and that writing took `pace` times as long as hashing."""
        if size_bytes >= JUDGED_BYTES and pace > 0:
            self._paces.append(pace)


def _first_match(rules: Mapping[str, T], ref: str) -> T | None:
    for glob, value in rules.items():
        if fnmatchcase(ref, glob):
            return value
    return None


def check_delta(delta: object) -> DeltaOption:
    """Checks the option ``delta``: True or False (store differences to earlier snapshots), the number of snapshots per full one, or None.

    Raises:
        InvalidOptionError: it is none of these.
    """
    if delta is None or isinstance(delta, bool) or (isinstance(delta, int) and 0 < delta <= MAX_FULL_EVERY):
        return delta
    raise InvalidOptionError(f"delta must be True, False or a number from 1 to {MAX_FULL_EVERY}, not {delta!r}", object_id="delta")


def check_codec_name(name: object) -> CodecName:
    """Checks the option ``codec``. Raises `InvalidOptionError` if it is not the name of a codec."""
    if name not in get_args(CodecName):
        raise InvalidOptionError(f"codec must be one of {', '.join(map(repr, get_args(CodecName)))}, not {name!r}", object_id="codec")
    return cast(CodecName, name)


def check_recode_mode(name: object) -> Mode:
    """Checks the mode to re-encode blocks with. Raises `InvalidOptionError` if it is not one that makes blocks smaller."""
    if name not in ("fast", "small"):
        raise InvalidOptionError(f"codec must be 'fast' or 'small' to re-encode snapshots, not {name!r}", object_id="codec")
    return name
