"""Dtypes and limits of the safetensors format, for everything here that reads or writes it. Does not load torch."""

from typing import Final

METADATA: Final = "__metadata__"
"""The one key of a header that names no tensor."""
MAX_HEADER_BYTES: Final = 100_000_000
"""Readers reject larger headers."""
_TORCH: Final = """
    bool:BOOL uint8:U8 int8:I8 uint16:U16 int16:I16 uint32:U32 int32:I32 uint64:U64 int64:I64 float16:F16 bfloat16:BF16 float32:F32
    float64:F64 complex64:C64 float8_e4m3fn:F8_E4M3 float8_e5m2:F8_E5M2 float8_e8m0fnu:F8_E8M0 float8_e4m3fnuz:F8_E4M3FNUZ
    float8_e5m2fnuz:F8_E5M2FNUZ float4_e2m1fn_x2:F4"""
TORCH_DTYPES: Final = dict(pair.partition(":")[::2] for pair in _TORCH.split())
"""Torch's name -> the format's name. An element of float4_e2m1fn_x2 is two of F4: the format's last dimension has twice the size."""
BITS: Final = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of an element of the dtypes whose elements are smaller than a byte. torch has none of F6."""
NUMPY_DTYPES: Final = {"b1": "BOOL", "f2": "F16", "f4": "F32", "f8": "F64", "c8": "C64"} | {
    f"{kind}{size}": f"{kind.upper()}{size * 8}" for kind in "ui" for size in (1, 2, 4, 8)
}
"""Kind and bytes of a numpy dtype -> the format's name."""


def file_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape in the format of a torch tensor; None if the format cannot hold it. `dtype`: the format's name."""
    if dtype != "F4":
        return shape
    return (*shape[:-1], shape[-1] * 2) if shape else None
