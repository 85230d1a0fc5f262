"""How a block's bytes are encoded in a pack. Pure: bytes in, bytes out; every codec is lossless.

registry.py        codec numbers, decoding by number, the codecs `lz4` and `zstd`
encoder.py         chooses the codec of a block by the mode
codec_policy.py    chooses the mode of a save: the user's option, or measured for `auto`
byte_planes.py     the codec `planes`, for numbers
delta.py           the codec `delta`: differences to an earlier block
changed_words.py   finds the words that differ from those of a base, and applies them
compiled.py        the compiled kernel, where there is one
cast.py            the codec `cast`: 16-bit weights as the rounding of fp32 masters
byte_split.py      splits words into groups of bytes and merges them; zigzag differences
entropy.py         entropy-codes a group of bytes with zstd

The kernel is in C: `_kernel.c` (the module), `_planes.c`, `_differences.c`, `_changes.c`, `_roundings.c`, and zstd frames that are a
Huffman code and nothing else: `_huffman_code.c`, `_huffman_encode.c`, `_huffman_decode.c`.
"""

from tensorstore_ck.format.codec.byte_planes import Elements, elements_of
from tensorstore_ck.format.codec.cast import KINDS, cast_sample
from tensorstore_ck.format.codec.changed_words import Changes, apply_changes, find_changes, patch_changes, sum_of, visit_changed
from tensorstore_ck.format.codec.codec_policy import (
    CodecName,
    CodecOption,
    CodecPolicy,
    Coding,
    DeltaOption,
    DeltaRules,
    check_codec_name,
    check_delta,
    check_recode_mode,
)
from tensorstore_ck.format.codec.delta import HEAD_BYTES, decode_changes, max_changes
from tensorstore_ck.format.codec.encoder import Encoded, Encoder, Mode, may_be_worth_reading, sample_of
from tensorstore_ck.format.codec.registry import CODECS_WITH_BASES, Codec, StoredBlock, base_count, codec_name, decode, elements_in

__all__ = [
    "CODECS_WITH_BASES",
    "HEAD_BYTES",
    "KINDS",
    "Changes",
    "Codec",
    "CodecName",
    "CodecOption",
    "CodecPolicy",
    "Coding",
    "DeltaOption",
    "DeltaRules",
    "Elements",
    "Encoded",
    "Encoder",
    "Mode",
    "StoredBlock",
    "apply_changes",
    "base_count",
    "cast_sample",
    "check_codec_name",
    "check_delta",
    "check_recode_mode",
    "codec_name",
    "decode",
    "decode_changes",
    "elements_in",
    "elements_of",
    "find_changes",
    "max_changes",
    "may_be_worth_reading",
    "patch_changes",
    "sample_of",
    "sum_of",
    "visit_changed",
]
