"""Folders of torch's HuggingFaceStorageWriter with ``save_distributed=True``: safetensors files of each rank, with pieces of tensors.

A file's own metadata has the offset of each piece. Neither the sizes of tensors nor the number of ranks are stored: a tensor ends, as for
torch's own reader, where its last piece ends, and nothing shows that the files of the last ranks are missing.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from tensorstore_ck.common.units import listed
from tensorstore_ck.format.layout import MAX_TENSOR_BYTES
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.integrations.importing.dcp_folder import assembled
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file, printable
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder
from tensorstore_ck.integrations.importing.numbers_in_names import missing_files
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.placeholders import FoundState, Unstorable
from tensorstore_ck.integrations.importing.safetensors_file import SafetensorsContent, is_safetensors, load_safetensors, parse_json
from tensorstore_ck.state.rank_shares import LocalPiece

KIND: Final = "folder of HuggingFaceStorageWriter"
OFFSETS: Final = "DCP_SHARDING_INFO"
"""The key of the offsets in a file's metadata."""
_OF_A_RANK: Final = re.compile(r"shard-(\d{5})-")


def load_sharded(files: Files, folder: Folder, names: Sequence[str], known: PickleAllowlist) -> FoundState | None:
    """The state in a folder of these names; None if its safetensors files are of another kind."""
    parts: dict[str, SafetensorsContent] = {}
    for name in (name for name in names if name.endswith(".safetensors") and folder.has(name)):
        file = files.map(folder.join(name))
        if not is_safetensors(file):
            return None
        parts[name] = load_safetensors(file)
        if OFFSETS not in parts[name].metadata:
            return None
    if not parts:
        return None
    pieces: defaultdict[str, list[LocalPiece]] = defaultdict(list)
    for name, part in parts.items():
        known.parsed_bytes += part.header_bytes
        with naming_file(folder.join(name), "file of HuggingFaceStorageWriter"):
            _add_pieces(part, pieces)
    ranks = {int(match[1]) for name in parts if (match := _OF_A_RANK.match(name))}
    absent = [f"shard-{number:05}-*" for number in range(1, max(ranks, default=0)) if number not in ranks]
    missing = (*missing_files(parts), *absent)
    with naming_file(folder.path, KIND):
        try:
            state = {name: _tensor(name, of_tensor) for name, of_tensor in sorted(pieces.items())}
        except MalformedError as exc:
            raise MalformedError(f"{exc} (it lacks {listed(missing)})" if missing else str(exc)) from exc
    skipped = tuple((name, "not a file of a rank") for name in names if name not in parts)
    return FoundState(KIND, state, {}, {}, skipped=skipped, files=tuple(parts), missing=missing)


def _add_pieces(part: SafetensorsContent, pieces: defaultdict[str, list[LocalPiece]]) -> None:
    entries = parse_json(part.metadata[OFFSETS].encode())
    if type(entries) is not dict or entries.keys() != part.tensors.keys():
        raise MalformedError("its offsets are not those of its tensors")
    for name, tensor in part.tensors.items():
        if isinstance(tensor, Unstorable):
            raise MalformedError(f"{printable(name)!r} is {tensor.name}")
        offsets = entries[name].get("saved_offsets") if type(entries[name]) is dict else None
        if type(offsets) is not list or len(offsets) != tensor.ndim:
            raise MalformedError(f"it has no valid offset of {printable(name)!r}")
        if any(type(offset) is not int or not 0 <= offset <= MAX_TENSOR_BYTES for offset in offsets):
            raise MalformedError(f"it has no valid offset of {printable(name)!r}")
        pieces[name].append(LocalPiece(BoxBounds(tuple(offsets), tuple(tensor.shape)), tensor))


def _tensor(name: str, pieces: Sequence[LocalPiece]) -> Any:
    boxes = [piece.box for piece in pieces]
    dtypes = {piece.tensor.dtype for piece in pieces}
    if len({len(box.offsets) for box in boxes}) > 1 or len(dtypes) > 1:
        raise MalformedError(f"the pieces of {printable(name)!r} have several dtypes or numbers of dimensions")
    ends = [[offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)] for box in boxes]
    return assembled(name, tuple(map(max, zip(*ends, strict=True))), dtypes.pop(), pieces)
