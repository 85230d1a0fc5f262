"""Safetensors files: a JSON header with the position of each tensor's bytes, then the bytes.

Does not use the library: the format is small, and the file can be mapped. Like the library it rejects headers over 100 MB, and tensors
that overlap or leave gaps.
"""

from math import prod
from typing import Any, Final, NamedTuple, NoReturn

import torch

from tensorstore_ck.common import foreign_text
from tensorstore_ck.format.layout import MAX_DIMS, MAX_TENSOR_BYTES
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file, printable
from tensorstore_ck.integrations.importing.mapped_files import MappedFile
from tensorstore_ck.integrations.importing.placeholders import Unstorable
from tensorstore_ck.integrations.safetensors_format import BITS, MAX_HEADER_BYTES, METADATA, TORCH_DTYPES
from tensorstore_ck.state.byte_sources import strided
from tensorstore_ck.state.registered_types import DTYPES

_DTYPES: Final = {code: DTYPES[name] for name, code in TORCH_DTYPES.items() if name in DTYPES}


class SafetensorsContent(NamedTuple):
    """The content of a safetensors file."""

    tensors: dict[str, torch.Tensor | Unstorable]
    metadata: dict[str, str]
    header_bytes: int


def is_safetensors(file: MappedFile) -> bool:
    """Whether it begins like a safetensors file."""
    return file.size >= 10 and int.from_bytes(file.data[:8], "little") <= MAX_HEADER_BYTES and bytes(file.data[8:9]) == b"{"


def load_safetensors(file: MappedFile) -> SafetensorsContent:
    """Its tensors, mapped, in the order of their names. Raises `CorruptObjectError` if it is damaged or inconsistent."""
    with naming_file(file.path, "safetensors file"):
        header_bytes = int.from_bytes(file.data[:8], "little")
        if header_bytes > min(MAX_HEADER_BYTES, file.size - 8):
            raise MalformedError(f"it claims a header of {header_bytes} bytes, and has {file.size}")
        header = parse_json(bytes(file.data[8 : 8 + header_bytes]))
        if type(header) is not dict:
            raise MalformedError("its header is not a JSON object")
        metadata = header.pop(METADATA, None) or {}
        if type(metadata) is not dict or any(type(text) is not str for text in metadata.values()):
            raise MalformedError("its metadata is not text")
        tensors, spans = {}, []
        for name in sorted(header):
            tensors[name], span = _tensor(file, name, header[name], 8 + header_bytes)
            spans.append(span)
        end = 8 + header_bytes
        for start, stop in sorted(spans):
            if start != end:
                raise MalformedError(f"its tensors overlap, or leave a gap, at byte {start}")
            end = stop
        if end != file.size:
            raise MalformedError(f"its tensors end at byte {end} of {file.size}")
    return SafetensorsContent(tensors, dict(sorted(metadata.items())), header_bytes)


def parse_json(data: bytes, *, allow_constants: bool = False) -> Any:
    """Foreign JSON, or a `MalformedError`. `allow_constants`: it may have NaN and Infinity, as Python writes them."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise MalformedError("its JSON has a duplicate key")
        return fields

    def no_constant(text: str) -> NoReturn:
        raise MalformedError(f"its JSON has {text}, which is not a number")

    try:
        return foreign_text.parse_json(data, object_pairs_hook=unique, parse_constant=None if allow_constants else no_constant)
    except MalformedError:
        raise
    except ValueError as exc:
        raise MalformedError(f"its JSON cannot be read ({printable(exc)})") from exc


def _tensor(file: MappedFile, name: str, entry: Any, base: int) -> tuple[torch.Tensor | Unstorable, tuple[int, int]]:
    """A tensor, and the start and end of its bytes in the file."""
    shown = printable(name, 100)
    if type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise MalformedError(f"its header has an invalid entry for {shown!r}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    code = entry["dtype"] if type(entry["dtype"]) is str else ""
    dtype = _DTYPES.get(code)
    if dtype is None and code not in BITS:
        raise MalformedError(f"{shown!r} has the dtype {printable(entry['dtype'], 40)!r}, which safetensors does not have")
    for numbers in (shape, offsets):
        if type(numbers) is not list or any(type(number) is not int or not 0 <= number <= MAX_TENSOR_BYTES for number in numbers):
            raise MalformedError(f"{shown!r} has an impossible shape or position")
    if len(shape) > MAX_DIMS or len(offsets) != 2:
        raise MalformedError(f"{shown!r} has an impossible shape or position")
    start, stop = base + offsets[0], base + offsets[1]
    bits = BITS[code] if code in BITS or dtype is None else dtype.itemsize * 8
    if not start <= stop <= file.size or prod(shape) * bits != (stop - start) * 8:
        raise MalformedError(
            f"{shown!r} claims {prod(shape)} elements of {code} in bytes {start} to {stop} of the file, which has {file.size}"
        )
    if prod(size or 1 for size in shape) > MAX_TENSOR_BYTES:
        raise MalformedError(f"{shown!r} has an impossible shape or position")
    if dtype is None or (code == "F4" and (not shape or shape[-1] % 2)):
        return Unstorable(f"a tensor of {code}{list(shape)[:8]}, which torch does not have"), (start, stop)
    if code == "F4":
        shape = [*shape[:-1], shape[-1] // 2]
    memory = torch.empty(0, dtype=torch.uint8).set_(file.storage(start, stop - start))
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return strided(memory, dtype=dtype, shape=tuple(shape), strides=tuple(strides), offset_bytes=0), (start, stop)
