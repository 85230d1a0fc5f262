"""Encodes the blocks of a save by its mode.

`raw` leaves tensors unencoded; `fast` uses a pure entropy coder, at about 1 GB/s per core; `small` spends more time for smaller blocks.
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.format.codec.byte_planes import Elements, encode_planes, estimate_planes_bytes, guess_elements
from tensorstore_ck.format.codec.cast import KINDS, encode_cast
from tensorstore_ck.format.codec.changed_words import Changes, find_changes
from tensorstore_ck.format.codec.delta import encode_all, encode_few, estimate_delta_bytes, is_dense, max_changes
from tensorstore_ck.format.codec.entropy import EntropyCoder
from tensorstore_ck.format.codec.registry import Codec, encode_lz4, encode_zstd

Mode = Literal["raw", "fast", "small"]
WORTH: Final = 0.97
"""A difference must be smaller than this share of the block encoded by itself, else reading its base costs more than it saves."""
SMALL: Final = 1 / 16
"""A difference up to this share of the block is taken without estimating the block by itself, which takes as long as its coding."""
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

    def __init__(self, mode: Mode) -> None:
        self._mode: Mode = mode
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
        view, coder = memoryview(raw).cast("B"), self._coder_of_mode()
        limit = max_changes(len(view), elements.item_bytes)
        if changes is None and not is_dense(view, base, elements.item_bytes):
            changes = find_changes(view, base, elements.item_bytes, is_float=elements.is_float, limit=limit)
        if changes is not None and changes.changed > limit:
            changes = None
        worth_bytes: float | None = None
        if changes is not None:
            pieces = encode_few(changes, elements, coder)
        else:
            worth_bytes = WORTH * estimate_planes_bytes(view, elements)
            if estimate_delta_bytes(view, base, elements) > worth_bytes:
                return None
            pieces = encode_all(view, base, elements, coder)
        size_bytes = sum(map(len, pieces))
        if size_bytes > SMALL * len(view) and size_bytes > (worth_bytes or WORTH * estimate_planes_bytes(view, elements)):
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
