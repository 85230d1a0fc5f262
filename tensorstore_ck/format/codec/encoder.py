"""Encodes the blocks of a save by its mode.

`raw` leaves tensors unencoded; `fast` uses a pure entropy coder, at about 1 GB/s per core; `small` spends more time for smaller blocks.
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.threads import Scratch
from tensorstore_ck.format.codec.byte_planes import Elements, encode_planes, estimate_planes_share, guess_elements
from tensorstore_ck.format.codec.byte_split import Words, words_of
from tensorstore_ck.format.codec.cast import KINDS, encode_cast
from tensorstore_ck.format.codec.changed_words import Changes, find_changes
from tensorstore_ck.format.codec.delta import (
    encode_all,
    encode_few,
    estimate_delta_share,
    has_one_scale,
    is_dense,
    max_changes,
    sample_differences,
)
from tensorstore_ck.format.codec.entropy import EntropyCoder, sample
from tensorstore_ck.format.codec.registry import Codec, encode_lz4, encode_zstd

Mode = Literal["raw", "fast", "small"]
WORTH: Final = 0.97
"""A difference must be smaller than this share of the block encoded by itself, else reading its base costs more than it saves."""
TRIED: Final = 0.96
"""Where a base has one scale, a difference is encoded if it is estimated at up to this share. Samples estimate it 0.01 to 0.02 too low: of
such blocks of a training between this share and `WORTH`, one in twenty was worth it, and by 2 %. For other bases a sample may estimate it
0.2 too high, since differences are sorted by scale, with a code for each."""
SMALL: Final = 1 / 16
"""A difference of few words is taken up to this share of the block; to estimate the block by itself takes as long as their coding."""
LEVELS: Final = {"fast": 1, "small": 9}
"""zstd levels."""


class Encoded(NamedTuple):
    """A block's stored bytes."""

    codec: Codec
    pieces: tuple[Buffer, ...]


class EncodedDelta(NamedTuple):
    """A block as a difference, and what differs."""

    encoded: Encoded
    changes: Changes | None
    """None: too many."""


class Encoder:
    """Encodes blocks. Not thread-safe."""

    def __init__(self, mode: Mode, scratch: Scratch | None = None) -> None:
        """`scratch`: memory to work in, which encoders may share."""
        self._mode: Mode = mode
        self._scratch = scratch or Scratch()
        self._coder: EntropyCoder | None = None

    def encode_tensor(self, raw: Buffer, elements: Elements) -> Encoded:
        """Encodes a tensor's block."""
        if self._mode == "raw" or not len(raw):
            return Encoded(Codec.RAW, (raw,))
        pieces = encode_planes(memoryview(raw), elements, self._coder_of_mode())
        return Encoded(Codec.RAW, (raw,)) if pieces is None else Encoded(Codec.PLANES, tuple(pieces))

    def encode_unknown(self, raw: memoryview) -> Encoded:
        """Encodes a block of unknown content, as the elements that fit a sample best."""
        return self.encode_tensor(raw, guess_elements(raw))

    def encode_cast(self, raw: Buffer, masters: Sequence[memoryview], dtype: str) -> Encoded | None:
        """Encodes weights as the rounding of their masters; None if they differ from it."""
        stored = encode_cast(memoryview(raw), masters, KINDS[dtype])
        return None if stored is None else Encoded(Codec.CAST, (stored,))

    def encode_delta(self, raw: Buffer, base: memoryview, elements: Elements, changes: Changes | None = None) -> EncodedDelta | None:
        """Encodes a tensor's block as a difference to `base`; None if that is not clearly smaller than the block by itself.

        `changes`: what is known to differ. If these are few, `base` is not read.
        """
        view, coder, item_bytes = memoryview(raw).cast("B"), self._coder_of_mode(), elements.item_bytes
        limit, some = max_changes(len(view), item_bytes), None
        if changes is None or changes.changed > limit:
            some, other = sample(words_of(view, item_bytes)), sample(words_of(base, item_bytes))
            differences = sample_differences(some, other, is_float=elements.is_float)
            if changes is None and not is_dense(differences):
                changes = find_changes(view, base, item_bytes, is_float=elements.is_float, limit=limit)
        if changes is not None and changes.changed > limit:
            changes = None
        pieces: list[bytes | memoryview]
        if changes is not None:
            pieces = [b"".join(encode_few(changes, elements, coder))]  # nine pieces take longer to check and to write
            if len(pieces[0]) <= SMALL * len(view):
                return EncodedDelta(Encoded(Codec.DELTA, tuple(pieces)), changes)
        own_share = estimate_planes_share(sample(words_of(view, item_bytes)) if some is None else some, rotated=elements.is_float)
        if changes is None:
            is_tried = estimate_delta_share(differences) <= _tried_to(other, elements) * own_share
            coded = encode_all(view, base, elements, coder, scratch=self._scratch) if is_tried else None
            if coded is None:
                return None
            pieces = coded
        if sum(map(len, pieces)) > WORTH * len(view) * own_share:
            return None
        return EncodedDelta(Encoded(Codec.DELTA, tuple(pieces)), changes)

    def encode_opaque(self, raw: Buffer) -> Encoded:
        """Encodes opaque bytes, with compression in every mode, since they are few."""
        codec, stored = encode_zstd(raw, LEVELS["small"]) if self._mode == "small" else encode_lz4(raw)
        return Encoded(codec, (stored,))

    def _coder_of_mode(self) -> EntropyCoder:
        if self._coder is None:
            self._coder = EntropyCoder(LEVELS[self._mode])
        return self._coder


def sample_of(raw: Buffer, elements: Elements) -> bytes:
    """What `may_be_worth_reading` needs of a block."""
    return sample(words_of(memoryview(raw).cast("B"), elements.item_bytes)).tobytes()


def may_be_worth_reading(raw: Buffer, base_sample: bytes, elements: Elements) -> bool:
    """Whether a difference to a base, of which only a sample is known, may be clearly smaller than the block by itself."""
    some, other = sample(words_of(memoryview(raw).cast("B"), elements.item_bytes)), words_of(base_sample, elements.item_bytes)
    if len(some) != len(other):
        return True
    differences = sample_differences(some, other, is_float=elements.is_float)
    if not is_dense(differences):
        return True
    return estimate_delta_share(differences) <= _tried_to(other, elements) * estimate_planes_share(some, rotated=elements.is_float)


def _tried_to(base_sample: Words, elements: Elements) -> float:
    """Up to which estimated share a difference is encoded."""
    return TRIED if elements.is_float and has_one_scale(base_sample) else WORTH
