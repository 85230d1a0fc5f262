"""A snapshot as a model folder of Hugging Face, for ``from_pretrained``: weights, configuration, generation configuration, tokenizer.

The small files come from the snapshot (see `model_file_names`), or from another folder. With an ``adapter_config.json`` the folder is an
adapter of peft: only the adapter's weights, under peft's names.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.extras import missing_extra
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.units import listed
from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import MismatchError, NotFoundError, UnsupportedValueError
from tensorstore_ck.format.tree import Container, Leaf, Tree, leaves
from tensorstore_ck.format.values import decode
from tensorstore_ck.integrations.exporting.job import ExportJob, WrittenExport
from tensorstore_ck.integrations.exporting.output_file import write_file
from tensorstore_ck.integrations.exporting.safetensors_files import write_safetensors
from tensorstore_ck.integrations.exporting.strip_prefix import DICTS
from tensorstore_ck.integrations.exporting.try_model_folder import try_folder
from tensorstore_ck.integrations.model_file_names import (
    ADAPTER_CONFIG,
    ADAPTER_NAMES,
    CONFIG,
    MAX_FILE_BYTES,
    MODEL_FILES,
    is_model_file,
    stored_files,
)
from tensorstore_ck.state.registered_types import decode_torch

ADAPTER_STEM: Final = "adapter_model"
_WEIGHTS_KEYS: Final = ("model", "state_dict", ADAPTER_STEM)
"""Keys of weights in a state, as trainers name them."""


class ModelFiles(NamedTuple):
    """The small files of a model folder."""

    files: Mapping[str, bytes]
    adapter_names: Mapping[str, str] | None = None
    """Name in peft's file -> name in the model."""

    @property
    def is_adapter(self) -> bool:
        """Whether the folder is an adapter of peft."""
        return ADAPTER_CONFIG in self.files


def find_model_files(content: SnapshotContent, tree: Tree, config_from: str | None) -> ModelFiles:
    """The small files for the folder: those in the snapshot, replaced by those of `config_from`.

    Raises `NotFoundError` if there is no configuration, `UnsupportedValueError` if one of the snapshot's files is none of a model.
    """
    files = dict(_stored(content, tree))
    if config_from is not None:
        files |= _of_folder(config_from if os.path.isdir(config_from) else _downloaded(config_from))
    names = files.pop(ADAPTER_NAMES, None)
    if CONFIG not in files and ADAPTER_CONFIG not in files:
        where = "the snapshot contains none" if config_from is None else f"{config_from} has none"
        raise NotFoundError(
            f"a model folder needs a {CONFIG}, and {where}: give --config-from DIR (config_from=). tensorstore_ck.hf.Trainer saves it with "
            "each snapshot, and so does TrainingState(extra={'model_files': tensorstore_ck.hf.model_files(model, tokenizer)})",
            object_id=CONFIG,
        )
    return ModelFiles(files, None if names is None else _parsed(names, ADAPTER_NAMES))


def without_model_files(tree: Tree) -> Tree:
    """`tree` without the small files at its top."""
    if not isinstance(tree, Container) or MODEL_FILES not in tree.keys or tree.node[0] not in DICTS:
        return tree
    kept = [(key, child) for key, child in zip(tree.keys, tree.children, strict=True) if key != MODEL_FILES]
    return Container(
        node=tree.node, path=tree.path, keys=[key for key, _ in kept], children=[child for _, child in kept], attributes=tree.attributes
    )


def weights_globs(tree: Tree) -> list[str] | None:
    """The selection if the user gives none: the dict with the weights; None: everything. Raises `MismatchError` if several may be that."""
    if not isinstance(tree, Container):
        return None
    parts = [(str(key), child) for key, child in zip(tree.keys, tree.children, strict=False) if isinstance(child, Container)]
    holders = [key for key, part in parts if any(leaf.kind != "value" for leaf in leaves(part))]
    usual = [key for key in _WEIGHTS_KEYS if key in holders]
    if usual:
        return [f"{usual[0]}.*"]
    if len(holders) > 1:
        raise MismatchError(
            f"several parts of the snapshot have tensors ({listed(holders)}): say which one has the weights with --include "
            f"'{holders[0]}.*' (select=)",
            object_id=holders[0],
        )
    is_alone = not any(isinstance(child, Leaf) and child.kind != "value" for child in tree.children)
    return [f"{holders[0]}.*"] if holders and is_alone else None


def adapter_weights(tree: Tree, names: Mapping[str, str] | None) -> Tree:
    """The adapter's weights under peft's names; `tree` has the model's, without prefix.

    Raises:
        MismatchError: the names are not known, or a weight is not there.
    """
    if names is None:
        if any(leaf.path.endswith((".lora_A.weight", ".lora_B.weight")) for leaf in leaves(tree)):
            return tree  # imported from a folder of peft
        raise MismatchError(
            f"the snapshot does not contain peft's names of the adapter's weights ({ADAPTER_NAMES}): save it with "
            "tensorstore_ck.hf.Trainer, or with TrainingState(extra={'model_files': tensorstore_ck.hf.model_files(model)})",
            object_id=ADAPTER_NAMES,
        )
    there = {leaf.path: leaf for leaf in leaves(tree) if leaf.kind != "value"}
    missing = [name for name in names.values() if name not in there]
    if missing:
        raise MismatchError(f"the snapshot lacks weights of the adapter: {listed(missing)}", object_id=missing[0])
    renamed = [Leaf(to, there[name].kind, there[name].index, there[name].node) for to, name in names.items()]
    return Container(node=["d", [], []], path="", keys=list(names), children=list(renamed), attributes=None)


def write_model_folder(job: ExportJob, model: ModelFiles) -> WrittenExport:
    """Writes the folder, and tries whether transformers or peft loads it.

    Raises:
        MismatchError: they do not, or a weight is missing or too many.
        UnsupportedValueError: see `write_safetensors`.
    """
    if model.is_adapter:
        job = job._replace(stem=ADAPTER_STEM, max_file_bytes=1 << 62)  # peft reads one file
    written = write_safetensors(job._replace(with_values=False))
    for name, data in sorted(model.files.items()):
        write_file(os.path.join(job.folder, name), job.target.path, data)
    note = try_folder(job.folder, job.target.path, _parsed(model.files[ADAPTER_CONFIG if model.is_adapter else CONFIG], CONFIG))
    return written._replace(notes=[*written.notes, note])


def _stored(content: SnapshotContent, tree: Tree) -> Iterator[tuple[str, bytes]]:
    for name, leaf in stored_files(tree).items():
        if name != ADAPTER_NAMES and not is_model_file(name):
            raise UnsupportedValueError(
                f"{MODEL_FILES} has {name!r}, which is no name of a file of a model: export as safetensors", object_id=name
            )
        data = None
        if isinstance(leaf, Leaf) and leaf.kind == "value":
            data = decode(content.values[leaf.index], decode_other=decode_torch, blob=content.blob, name=name)
        if not isinstance(data, bytes | str):
            raise UnsupportedValueError(f"{MODEL_FILES} has {name!r}, neither bytes nor text: save the file's bytes", object_id=name)
        yield name, data if isinstance(data, bytes) else data.encode()


def _of_folder(folder: str) -> dict[str, bytes]:
    files = {}
    with os_errors("read", folder):
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if is_model_file(name) and os.path.isfile(path):
                if os.path.getsize(path) > MAX_FILE_BYTES:
                    raise UnsupportedValueError(f"{path} has more than {MAX_FILE_BYTES:,} bytes: remove it", object_id=path)
                with open(path, "rb") as file:
                    files[name] = file.read()
    return files


def _downloaded(name: str) -> str:
    """The folder with the small files of a model on the hub, from the user's cache if the hub cannot be reached."""
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - an extra
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415
    except ImportError as exc:
        raise missing_extra("hf", f"{name} is no folder, and a name on the Hugging Face hub") from exc
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as exc:
        raise NotFoundError(
            f"--config-from {name}: there is no such folder, and the Hugging Face hub has no such model or cannot be reached "
            f"({str(exc).splitlines()[0]})",
            object_id=name,
        ) from exc


def _parsed(data: bytes, name: str) -> dict[str, Any]:
    try:
        parsed = parse_json(data)
    except ValueError as exc:
        raise MismatchError(f"{name} is not JSON ({exc}): give another with --config-from", object_id=name) from exc
    if not isinstance(parsed, dict):
        raise MismatchError(f"{name} is no JSON object: give another with --config-from", object_id=name)
    return parsed
