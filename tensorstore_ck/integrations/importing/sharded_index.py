"""Checkpoints in several files with an index that says which tensor is in which: ``model.safetensors.index.json`` and its like.

As their readers do, takes all that is in the files which the index names; more strictly than they, refuses an index that contradicts them.
"""

from typing import Any, Final, NamedTuple

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file, printable
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder, MappedFile
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.safetensors_file import MAX_HEADER_BYTES, is_safetensors, load_safetensors, parse_json
from tensorstore_ck.integrations.importing.torch_file import is_torch_file, load_torch_file

SUFFIX: Final = ".index.json"
KIND: Final = "index of a checkpoint"


class IndexedContent(NamedTuple):
    """What an index and its files hold."""

    state: dict[Any, Any]
    metadata: dict[str, str]
    """What all files say about themselves alike."""
    unknown: dict[str, str]
    files: tuple[str, ...]


def is_index(file: MappedFile) -> bool:
    """Whether it begins like one: like any JSON object."""
    return bytes(file.data[:64]).lstrip()[:1] == b"{" and file.size <= MAX_HEADER_BYTES


def load_indexed(files: Files, folder: Folder, index: MappedFile, known: PickleAllowlist) -> IndexedContent:
    """The state in the files that an index names.

    Raises:
        CorruptObjectError: a file is missing or damaged, or is not as the index says.
        InvalidNameError: the index names a file outside of its folder.
    """
    with naming_file(index.path, KIND):
        found = parse_json(bytes(index.data))
        places = found.get("weight_map") if type(found) is dict else None
        if type(places) is not dict or not places:
            raise MalformedError("it has no weight_map")
        names: dict[str, set[str]] = {}
        for name, place in places.items():
            if type(place) is not str:
                raise MalformedError("its weight_map names something that is no file")
            names.setdefault(place, set()).add(name)
        state: dict[Any, Any] = {}
        metadata: dict[str, str] | None = None
        unknown: dict[str, str] = {}
        for place in sorted(names):
            file = files.map(folder.join(place))
            part, said = _load(files, file, known, unknown)
            missing = sorted(names[place] - part.keys())
            if missing:
                raise MalformedError(f"it says that {printable(place)} has {printable(missing[0])!r}, which it has not")
            twice = state.keys() & part.keys()
            if twice:
                raise MalformedError(f"two of its files have {printable(min(map(str, twice)))!r}")
            state.update(part)
            metadata = said if metadata is None else dict(metadata.items() & said.items())
        return IndexedContent(state, dict(sorted((metadata or {}).items())), unknown, tuple(sorted(names)))


def _load(files: Files, file: MappedFile, known: PickleAllowlist, unknown: dict[str, str]) -> tuple[dict[Any, Any], dict[str, str]]:
    if is_safetensors(file):
        content = load_safetensors(file)
        known.parsed_bytes += content.header_bytes
        return dict(content.tensors), content.metadata
    if not is_torch_file(file):
        raise UnsupportedValueError(f"{file.path}, which an index names, is no safetensors or torch file", object_id=file.path)
    loaded = load_torch_file(files, file, known)
    unknown.update(dict.fromkeys(loaded.unknown, file.path))
    if not isinstance(loaded.value, dict):
        raise MalformedError(f"{file.path} holds no dict of tensors")
    return loaded.value, {}
