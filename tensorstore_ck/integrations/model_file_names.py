"""Names of the small files next to a model's weights in a folder of Hugging Face: configuration, generation configuration, tokenizer.

A snapshot contains them as a dict of names and bytes, under `MODEL_FILES` at the top or in ``extra``. Knows no transformers.
"""

import re
from typing import Final

from tensorstore_ck.format.tree import Container, Tree

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
