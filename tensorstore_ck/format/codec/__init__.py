"""How a block's bytes are encoded in a pack. Pure: bytes in, bytes out; every codec is lossless.

`general` knows what each codec number means, `encoder` which one to take; `planes` is for numbers, `words` and `entropy` are what it is
made of.
"""

from tensorstore_ck.format.codec.byte_planes import Elements, elements_of
from tensorstore_ck.format.codec.cast import KINDS, cast_sample
from tensorstore_ck.format.codec.codec_policy import (
    CodecName,
    CodecOption,
    CodecPolicy,
    Coding,
    DeltaOption,
    check_codec_name,
    check_delta,
    check_recode_mode,
)
from tensorstore_ck.format.codec.delta import HEAD_BYTES
from tensorstore_ck.format.codec.encoder import Encoded, Encoder, Mode
from tensorstore_ck.format.codec.registry import CODECS_WITH_BASES, Codec, StoredBlock, base_count, codec_name, decode, elements_in

__all__ = [
    "CODECS_WITH_BASES",
    "HEAD_BYTES",
    "KINDS",
    "Codec",
    "CodecName",
    "CodecOption",
    "CodecPolicy",
    "Coding",
    "DeltaOption",
    "Elements",
    "Encoded",
    "Encoder",
    "Mode",
    "StoredBlock",
    "base_count",
    "cast_sample",
    "check_codec_name",
    "check_delta",
    "check_recode_mode",
    "codec_name",
    "decode",
    "elements_in",
    "elements_of",
]
