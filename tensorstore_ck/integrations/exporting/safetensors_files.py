"""A snapshot as safetensors: `model.safetensors`, or numbered files with an index as Hugging Face writes them.

The format holds only named tensors. Tensors that share memory are copied under each name, so every reader finds every name. Other values go
to `values.json`, and are listed in the report. Does not use the safetensors package.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tensorstore_ck.common.units import listed
from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import MismatchError, UnsupportedValueError
from tensorstore_ck.format.tree import Leaf, Tree, leaves
from tensorstore_ck.format.values import decode, describe
from tensorstore_ck.integrations.exporting.atomic_target import AtomicTarget, require_disk_space
from tensorstore_ck.integrations.exporting.byte_routing import ByteRouter, scratch_bytes, size_bytes
from tensorstore_ck.integrations.exporting.job import ExportJob, WrittenExport, split_files
from tensorstore_ck.integrations.exporting.output_file import OutputFile, write_file
from tensorstore_ck.integrations.safetensors_format import MAX_HEADER_BYTES, METADATA, NUMPY_DTYPES, TORCH_DTYPES, file_shape
from tensorstore_ck.state.allocate import AnyDtype, LeafForm, form_of
from tensorstore_ck.state.registered_types import DTYPE_NAMES, decode_torch

SUFFIXES: Final = (".safetensors",)
VALUES_NAME: Final = "values.json"


class _Entry(NamedTuple):
    leaf: Leaf
    form: LeafForm
    dtype: str

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.form)


def write_safetensors(job: ExportJob) -> WrittenExport:
    """Writes the files into the job's folder. Raises `UnsupportedValueError` first if safetensors lacks a dtype, or reserves a name."""
    content, folder, target = job.content, job.folder, job.target
    entries = _entries(content, job.tree)
    values = {leaf.path: leaf for leaf in leaves(job.tree) if leaf.kind == "value" and leaf.index >= 0}
    groups = [entries] if target.is_file else split_files(entries, lambda entry: entry.size_bytes, job.max_file_bytes)
    texts = {**{key: text if isinstance(text, str) else json.dumps(text) for key, text in job.metadata.items()}, "format": "pt"}
    if target.is_file:
        names = [os.path.basename(target.path)]
    elif len(groups) == 1:
        names = [f"{job.stem}.safetensors"]
    else:
        names = [f"{job.stem}-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    total = sum(entry.size_bytes for entry in entries)
    headers = [_header(group, texts, target.path) for group in groups]
    require_disk_space(folder, total + scratch_bytes(content, (entry.leaf for entry in entries)), target.path)
    for name, group, header in zip(names, groups, headers, strict=True):
        with OutputFile(os.path.join(folder, name), target.path) as file:
            file.write(0, header)
            router, at = ByteRouter(content), len(header)
            for entry in group:
                router.add_leaf(entry.leaf, file, at)
                at += entry.size_bytes
            router.run(os.path.join(folder, "scratch"))
            file.finish(at)
    if len(groups) > 1:
        weights = {entry.leaf.path: name for name, group in zip(names, groups, strict=True) for entry in group}
        _write_json(folder, f"{job.stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weights}, target)
    where = "not a tensor"
    if values and job.with_values and not target.is_file:
        _write_json(folder, VALUES_NAME, _documents(content, values), target)
        where = f"not a tensor; in {VALUES_NAME}"
    return WrittenExport(len(entries), total, dict.fromkeys(values, where), [])


def _entries(content: SnapshotContent, tree: Tree) -> list[_Entry]:
    """Every tensor and array, those of large items first, so that each is aligned."""
    entries, unknown = [], []
    for leaf in leaves(tree):
        if leaf.kind == "value":
            continue
        form = form_of(content.layout, leaf)
        dtype = _dtype_name(form.dtype)
        if dtype is None or file_shape(dtype, form.shape) is None:
            unknown.append(f"{leaf.path} ({form.dtype})")
        elif leaf.path == METADATA:
            raise UnsupportedValueError(
                f"safetensors reserves the name {METADATA!r}: exclude that tensor with --exclude {METADATA} (exclude=)", object_id=METADATA
            )
        else:
            entries.append(_Entry(leaf, form, dtype))
    if unknown:
        raise UnsupportedValueError(
            f"safetensors has no dtype for {listed(unknown)}: leave it out with --exclude NAME (exclude=), or export as torch "
            "or dcp, which hold all dtypes",
            object_id=unknown[0].partition(" ")[0],
        )
    return sorted(entries, key=lambda entry: -entry.form.dtype.itemsize)


def _dtype_name(dtype: AnyDtype) -> str | None:
    if isinstance(dtype, np.dtype):
        return NUMPY_DTYPES.get(f"{dtype.kind}{dtype.itemsize}") if dtype.isnative or dtype.itemsize == 1 else None
    return TORCH_DTYPES.get(DTYPE_NAMES.get(dtype, ""))


def _header(entries: Sequence[_Entry], texts: Mapping[str, str], shown: str) -> bytes:
    table: dict[str, Any] = {METADATA: texts}
    at = 0
    for entry in entries:
        table[entry.leaf.path] = {
            "dtype": entry.dtype,
            "shape": file_shape(entry.dtype, entry.form.shape),
            "data_offsets": [at, at + entry.size_bytes],
        }
        at += entry.size_bytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedValueError(
            f"{shown}: the header of {len(entries):,} names has {len(text):,} bytes, and readers accept {MAX_HEADER_BYTES:,}: export to a "
            "folder with a smaller --max-file-size, or a part with --include",
            object_id=shown,
        )
    return len(text).to_bytes(8, "little") + text


def _write_json(folder: str, name: str, document: object, target: AtomicTarget) -> None:
    write_file(os.path.join(folder, name), target.path, json.dumps(document, indent=2).encode() + b"\n")


def _documents(content: SnapshotContent, values: Mapping[str, Leaf]) -> dict[str, dict[str, object]]:
    """Values as JSON, grouped by whether JSON holds them exactly."""
    exact: dict[str, object] = {}
    as_text: dict[str, object] = {}
    for path, leaf in values.items():
        try:
            encoded = content.values[leaf.index]
        except MismatchError:
            as_text[path] = "(not the same on all ranks)"
            continue
        value = decode(encoded, decode_other=decode_torch, blob=content.blob, name=path)
        if _is_json(value):
            exact[path] = value
        else:
            as_text[path] = str(describe(encoded))
    return {"values": exact, "as_text": as_text}


def _is_json(value: object) -> bool:
    if type(value) is list:
        return all(map(_is_json, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
