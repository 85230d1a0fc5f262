"""Which parts of a payload all ranks have in common, and which are each rank's own.

torch_checkpointing writes a file for each item and rank. Here the ranks save one state: tensors that are spread over ranks (DTensors), and
whatever is equal on all of them, are stored once and fit any number of ranks; the rest is each rank's own. Ranks find out by comparing
digests at each save.

The unit is a *leaf*: a value below dicts. A list is one leaf, with everything in it.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from blake3 import blake3
from torch import nn

from tensorstore_ck.common.ids import derived_hash
from tensorstore_ck.errors import MismatchError
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.session.group import Participant
from tensorstore_ck.session.group.rank_kinds import encode_kind
from tensorstore_ck.state import Box, Boxes, FlatShard
from tensorstore_ck.state.boxes import is_checkpointable
from tensorstore_ck.state.capture import capture
from tensorstore_ck.store.internals import groups_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tensorstore_ck.store import Store

Path = tuple[Any, ...]
Leaves = dict[Path, Any]
_TITLE: Final = "what ranks have of a checkpoint"
_GONE: Final = object()


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each leaf and its path."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    else:
        yield path, value


def is_spread(value: object) -> bool:
    """Whether a leaf is, or a list has, a share of something that is spread over ranks; or a tensor of a class of its own."""
    if isinstance(value, list | tuple):
        return any(map(is_spread, value))
    if isinstance(value, dict):
        return any(map(is_spread, value.values()))
    if isinstance(value, torch.Tensor):
        return type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer) or is_checkpointable(value)
    return isinstance(value, FlatShard | Box | Boxes)


def digest(path: Path, leaf: object) -> bytes:
    """Equal for equal leaves. Raises `UnsupportedValueError` if the leaf cannot be stored; the message has its path."""
    captured = capture({_name(path): leaf})
    hasher = blake3(encode_kind(captured, with_layout=True, known_blobs=b""), max_threads=blake3.AUTO)
    for source in captured.sources:
        hasher.update(source.read(0, source.size_bytes))
    return hasher.digest(16)


def find_own(store: "Store", group: "ProcessGroup", prepare: Callable[[], tuple[Leaves, Any]], timeout: float) -> tuple[set[Path], Any]:
    """The paths of this rank's own leaves, and what rank 0 says to all. All ranks call it, and wait `timeout` seconds for the others.

    `prepare` returns the leaves of this rank that may be its own, and what it says; an error in it is raised on all ranks.
    """
    place = groups_of(store).of(group)[0]
    attempt = place.begin(_TITLE, object_id=_TITLE, timeout=timeout)
    paths: dict[bytes, Path] = {}
    outcome: list[Any] = []

    def propose() -> Body:
        mine, common = prepare()
        paths.update((_key(path), path) for path in mine)
        return {"leaves": [[_key(path), digest(path, leaf)] for path, leaf in mine.items()], "said": common}

    def compare(proposals: list[Body]) -> Body:
        digests: dict[bytes, list[bytes]] = {}
        for proposal in proposals:
            for key, leaf_digest in take(proposal, "leaves", list):
                digests.setdefault(bytes(key), []).append(bytes(leaf_digest))
        own = [key for key, of_key in digests.items() if len(of_key) < len(proposals) or len(set(of_key)) > 1]
        return {"own": own, "said": proposals[0]["said"]}

    def execute(go: Body) -> Body:
        outcome.extend([{paths[bytes(key)] for key in take(go, "own", list) if bytes(key) in paths}, go["said"]])
        return {}

    attempt.run(Participant(propose=propose, execute=execute, resolve=None, compare=compare, commit=lambda _: {}))
    own, common = outcome
    return own, common


def _key(path: Path) -> bytes:
    """A short hash instead of the path: ranks exchange small records."""
    return derived_hash("path of a leaf", repr(path).encode())[:8]


def is_wanted(target: Any, path: Path) -> bool:
    """Whether a load into `target` fills the leaf at this path. None and an empty dict stand for everything."""
    for number, key in enumerate(path):
        if target is None or (isinstance(target, dict) and not target):
            return True
        if not isinstance(target, dict):
            name = _name(path[:number])
            raise MismatchError(f"{name} is a dict in the checkpoint, and a {type(target).__name__} in into=", object_id=name)
        if key not in target:
            return False
        target = target[key]
    return True


def without(value: Any, paths: Collection[Path]) -> Any:
    """The same without the leaves at these paths; what has none of them is not copied."""
    if not isinstance(value, dict):
        return value
    changed: dict[Any, Any] = {}
    for key in dict.fromkeys(path[0] for path in paths):
        if key in value:
            below = [path[1:] for path in paths if path[0] == key]
            changed[key] = _GONE if () in below else without(value[key], below)
    if all(child is value[key] for key, child in changed.items()):
        return value
    left = copy.copy(value)
    left.update(changed)
    for key in [key for key, child in changed.items() if child is _GONE]:
        del left[key]
    return left


def put_back(target: Any, restored: Any, own: Mapping[Path, Any], path: Path = ()) -> Any:
    """The result of a load: `target`, which is at `path`, filled; or everything if it is None.

    `restored` is what `without` left of it, restored. `own`: the wanted leaves of this rank below `path`, by their paths from there. Raises
    `MismatchError` if a leaf does not fit the target.
    """
    if () in own:
        return _fill(target, own[()], path)
    if not own:
        return restored
    filled = target if target is not None else restored if restored is not None else {}
    for key in dict.fromkeys([*filled, *(restored or ()), *(below_path[0] for below_path in own)]):
        below = {leaf_path[1:]: value for leaf_path, value in own.items() if leaf_path[0] == key}
        filled[key] = put_back(filled.get(key), (restored or {}).get(key), below, (*path, key))
    return filled


def _fill(target: Any, value: Any, path: Path) -> Any:
    if not isinstance(target, torch.Tensor):
        return value
    if not isinstance(value, torch.Tensor) or value.shape != target.shape or value.dtype != target.dtype:
        raise MismatchError(f"{_name(path)} is another kind of tensor, or none, in the checkpoint than in into=", object_id=_name(path))
    with torch.no_grad():
        target.copy_(value)
    return target


def _name(path: Path) -> str:
    return ".".join(map(str, path))
