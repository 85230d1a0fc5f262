"""Model folders of Hugging Face: names of the small files next to the weights, and dtypes and limits of safetensors. Does not load torch.

A snapshot contains the small files as a dict of names and bytes, under `MODEL_FILES` at the top or in ``extra``. Knows no transformers.
"""

import re
from typing import Final

from tensorstore_ck.format.tree import Container, Tree

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


MODEL_FILES: Final = "model_files"
"""The key of the files in a state."""
CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_NAMES: Final = "adapter_names.json"
"""Names in peft's file -> names in the model. Only in snapshots."""
SMALL_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,150}\.(json|txt|jinja|py|model|tiktoken|vocab|spm|bpe|codes)")
"""Fits no name with a folder, and no hidden one."""
USUAL_FILE: Final = re.compile(
    r"adapter_model\.safetensors|((adapter|generation|tokenizer|(pre)?processor|(video_)?preprocessor)_)?config\.json|tokenizer\.(json|model)|"
    r"special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|chat_template\.(json|jinja)|spiece\.model|"
    r"sentencepiece\.bpe\.model"
)
"""Fits names that an export may replace: none that a folder of something else would have."""
_OTHER_FILES: Final = re.compile(
    r".*\.index\.json|trainer_state\.json|snapshot\.json|values\.json|all_results\.json|(train|eval|test|predict)_results\.json|"
    r"README.*|requirements.*\.txt"
)
MAX_FILE_BYTES: Final = 256 << 20
"""The most bytes of one file; the largest tokenizers have some 30 MB."""


def is_model_file(name: str) -> bool:
    """Whether a file of this name, next to weights, belongs to the model."""
    return SMALL_FILE.fullmatch(name) is not None and _OTHER_FILES.fullmatch(name) is None


def stored_files(tree: Tree) -> dict[str, Tree]:
    """Name -> leaf of the files in a state. The names and values are not checked."""
    files = _child(tree, MODEL_FILES) or _child(_child(tree, "extra"), MODEL_FILES)
    return dict(zip(map(str, files.keys), files.children, strict=False)) if isinstance(files, Container) else {}


def _child(tree: Tree | None, key: str) -> Tree | None:
    if not isinstance(tree, Container):
        return None
    return next((child for name, child in zip(tree.keys, tree.children, strict=False) if name == key), None)
