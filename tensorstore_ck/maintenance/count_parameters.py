"""How many parameters a model has, from its ``config.json`` or the index of its safetensors files. Reads no weights."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError, NotFoundError

MAX_FILE_BYTES: Final = 64 << 20
_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_NAMES: Final = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
}
_NOT_GATED: Final = ("gpt2", "gpt_neox", "opt", "bert", "falcon", "bloom", "gptj")


class CountedParameters(NamedTuple):
    """A number of parameters."""

    parameters: int
    how: str
    """The source of the number."""


def count_parameters(path: Path) -> CountedParameters:
    """The parameters of the model that a JSON file, or a folder with one, describes.

    An index has the exact number, or the bytes of all weights, which the ``dtype`` of the config beside it divides. A config alone gives an
    estimate for decoders like Llama, Mistral, Qwen, Mixtral and GPT-2: without biases and norms, which are less than 1 %.

    Raises:
        NotFoundError: there is no such file.
        CorruptObjectError: it is not JSON.
        InvalidOptionError: it says too little.
    """
    index = path / "model.safetensors.index.json" if path.is_dir() else path
    config = path / "config.json" if path.is_dir() else path.parent / "config.json"
    if path.is_dir() and not index.exists():
        index = config
    read = _read(index)
    if "weight_map" not in read:
        return CountedParameters(_of_config(read, index), f"estimated from {index.name}")
    noted = read.get("metadata")
    metadata: Mapping[str, Any] = noted if isinstance(noted, dict) else {}
    exact, size = metadata.get("total_parameters"), metadata.get("total_size")
    if isinstance(exact, int) and exact > 0:
        return CountedParameters(exact, f"total_parameters of {index.name}")
    if not isinstance(size, int | float) or size <= 0:
        raise InvalidOptionError(f"{index} has neither total_parameters nor total_size: give --params", object_id=str(index))
    beside = _read(config) if config.exists() else {}
    dtype = str(beside.get("dtype") or beside.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in _DTYPE_BYTES:
        raise InvalidOptionError(f"{config} has the dtype {dtype!r}, whose size is not known: give --params", object_id=str(config))
    return CountedParameters(int(size) // _DTYPE_BYTES[dtype], f"total_size of {index.name} in {dtype}")


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(min(MAX_FILE_BYTES + 1, os.fstat(file.fileno()).st_size))
        read = parse_json(data) if len(data) <= MAX_FILE_BYTES else None
    except FileNotFoundError as exc:
        raise NotFoundError(f"there is no file {path}", object_id=str(path)) from exc
    except (OSError, ValueError) as exc:
        raise CorruptObjectError(f"{path} cannot be read as JSON: {exc}", object_id=str(path)) from exc
    if not isinstance(read, dict):
        raise CorruptObjectError(f"{path} is not a JSON object, or larger than {MAX_FILE_BYTES >> 20} MiB", object_id=str(path))
    return read


def _of_config(config: Mapping[str, Any], path: Path) -> int:
    """Embeddings, attention and feed-forward layers of a decoder."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config

    def number(*names: str, default: int | None = None) -> int:
        found = next((config[name] for name in names if type(config.get(name)) is int and 0 < config[name] < 1 << 40), default)
        if found is None:
            raise InvalidOptionError(f"{path} has no {names[0]}, so its parameters cannot be counted: give --params", object_id=str(path))
        return found

    hidden, layers, vocabulary = (number(*_NAMES[name]) for name in ("hidden", "layers", "vocabulary"))
    heads = number(*_NAMES["heads"], default=1)
    head = number("head_dim", default=max(1, hidden // heads))
    key_value = number("num_key_value_heads", default=heads) * head
    attention = 2 * hidden * heads * head + 2 * hidden * key_value
    matrices = 2 if config.get("model_type") in _NOT_GATED else 3
    wide = number(*_NAMES["feed_forward"], default=4 * hidden)
    experts = number("num_local_experts", "num_experts", "n_routed_experts", default=0)
    feed_forward = matrices * hidden * wide
    if experts:
        each = number("moe_intermediate_size", default=wide)
        shared = number("n_shared_experts", default=1) if config.get("n_shared_experts") else 0
        feed_forward = matrices * hidden * each * (experts + shared) + hidden * experts
    tied = config.get("tie_word_embeddings", config.get("model_type") in ("gpt2", "bert", "opt")) is True
    return vocabulary * hidden * (1 if tied else 2) + layers * (attention + feed_forward)
