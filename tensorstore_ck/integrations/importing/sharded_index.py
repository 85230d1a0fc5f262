"""Checkpoints in several files with an index, such as ``model.safetensors.index.json``, that maps tensors to files.

Like their own readers it imports everything in the files that the index names; unlike those it rejects an index that does not match them.
"""

from typing import Any, Final

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file, printable
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder, MappedFile
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.placeholders import FoundState
from tensorstore_ck.integrations.importing.safetensors_file import is_safetensors, load_safetensors, parse_json
from tensorstore_ck.integrations.importing.torch_file import is_torch_file, load_torch_file
from tensorstore_ck.integrations.safetensors_format import MAX_HEADER_BYTES

SUFFIX: Final = ".index.json"


def is_index(file: MappedFile) -> bool:
    """Whether it begins like a JSON object."""
    return bytes(file.data[:64]).lstrip()[:1] == b"{" and file.size <= MAX_HEADER_BYTES


def load_indexed(files: Files, folder: Folder, index: MappedFile, known: PickleAllowlist) -> FoundState:
    """The state in the files that an index names, with the metadata that all of them have in common.

    Raises:
        CorruptObjectError: a file is damaged, or does not match the index; or none exists.
        InvalidNameError: the index names a file outside of its folder.
    """
    with naming_file(index.path, "index of a checkpoint"):
        document = parse_json(bytes(index.data))
        files_of = document.get("weight_map") if type(document) is dict else None
        if type(files_of) is not dict or not files_of:
            raise MalformedError("it has no weight_map")
        names: dict[str, set[str]] = {}
        for name, part_name in files_of.items():
            if type(part_name) is not str:
                raise MalformedError("its weight_map has a file name that is not text")
            names.setdefault(part_name, set()).add(name)
        state: dict[Any, Any] = {}
        metadata: dict[str, str] | None = None
        unknown: dict[str, str] = {}
        found_at = {part_name: path for part_name in sorted(names) if (path := folder.find(part_name)) is not None}
        missing = tuple(sorted(names.keys() - found_at.keys()))
        if not found_at:
            folder.join(missing[0])  # raises
        for part_name, path in found_at.items():
            part, described = _load(files, files.map(path), known, unknown)
            lacking = sorted(names[part_name] - part.keys())
            if lacking:
                raise MalformedError(f"it lists {printable(lacking[0])!r} in {printable(part_name)}, which lacks it")
            twice = state.keys() & part.keys()
            if twice:
                raise MalformedError(f"two of its files have {printable(min(map(str, twice)))!r}")
            state.update(part)
            metadata = described if metadata is None else dict(metadata.items() & described.items())
        what, common = f"{len(found_at)} files with an index", dict(sorted((metadata or {}).items()))
        return FoundState(what, state, common, unknown, files=tuple(found_at), missing=missing)


def _load(files: Files, file: MappedFile, known: PickleAllowlist, unknown: dict[str, str]) -> tuple[dict[Any, Any], dict[str, str]]:
    if is_safetensors(file):
        content = load_safetensors(file)
        known.parsed_bytes += content.header_bytes
        return dict(content.tensors), content.metadata
    if not is_torch_file(file):
        raise UnsupportedValueError(f"{file.path}, which an index names, is not a safetensors or torch file", object_id=file.path)
    value, names = load_torch_file(files, file, known)
    unknown.update(names)
    if not isinstance(value, dict):
        raise MalformedError(f"{file.path} is not a dict of tensors")
    return value, {}
