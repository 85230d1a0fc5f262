"""Which items a payload can have and must have; which parts of it all ranks have in common, and which are each rank's own.

torch_checkpointing writes a file for each item and rank. Here the ranks save one state: tensors that are spread over ranks (DTensors), and
whatever is equal on all of them, are stored once and fit any number of ranks; the rest is each rank's own. Ranks find out by comparing
digests at each save.

The unit is a *leaf*: a value below dicts. A list is one leaf, with everything in it.
"""

import copy
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import nn

from tensorstore_ck.common.ids import derived_hash
from tensorstore_ck.errors import InvalidOptionError, MismatchError
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.session.group.rank_kinds import encode_kind
from tensorstore_ck.state import Box, Boxes, FlatShard
from tensorstore_ck.state.boxes import is_checkpointable
from tensorstore_ck.state.capture import capture
from tensorstore_ck.store import Store
from tensorstore_ck.store.internals import groups_of

Path = tuple[Any, ...]
Leaves = dict[Path, Any]
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


def find_own(store: Store, group: "dist.ProcessGroup", prepare: Callable[[], tuple[Leaves, Any]], timeout: float) -> tuple[set[Path], Any]:
    """The paths of this rank's own leaves, and what rank 0 says to all. All ranks call it, and wait `timeout` seconds for the others.

    `prepare` returns the leaves of this rank that may be its own, and what it says; an error in it is raised on all ranks.
    """
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

    def execute(go: Body) -> None:
        outcome.extend([{paths[bytes(key)] for key in take(go, "own", list) if bytes(key) in paths}, go["said"]])

    groups_of(store).of(group)[0].meet("what ranks have of a checkpoint", propose, compare, execute, timeout=timeout)
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


KEY: Final = re.compile(r"[a-zA-Z0-9_-]+")
UNSUPPORTED: Final = ("pre_finalize_callback", "finalize_callback", "subprocess_init_fn")
"""Options that belong to its files and its process."""


class UnfitItemsError(InvalidOptionError, KeyError, ValueError):
    """The items of a payload do not fit the `Config`; torch_checkpointing raises the built-in errors."""

    __str__ = Exception.__str__


class ItemSpecs(NamedTuple):
    """The specs of a `Config`."""

    items: Mapping[str, Any]
    """Key -> an `ItemSpec`."""
    is_open: bool
    """Whether there may be items without a spec."""
    shares_others: bool
    """Whether the default spec has a resharder."""
    asynchronous: bool

    @classmethod
    def of(cls, config: Any) -> "ItemSpecs":
        """The specs in a `Config`; None: its defaults.

        Raises:
            InvalidOptionError: it is no `Config`, or has an option that a store cannot honour.
        """
        if config is None:
            return cls({}, is_open=True, shares_others=False, asynchronous=True)
        for name in ("items", "default", "save"):
            if not hasattr(config, name):
                raise InvalidOptionError(
                    f"config must be a CheckpointManager.Config of torch_checkpointing, or None; {type(config).__name__} has no {name!r}",
                    object_id="config",
                )
        for name in UNSUPPORTED:
            if getattr(config, name, None) is not None:
                raise InvalidOptionError(
                    f"Config.{name} has no meaning for a store, which writes no files in a process of its own: leave it out, and wait for "
                    "the Future of save(), or use store.on_event()",
                    object_id=name,
                )
        shares_others = getattr(config.default, "resharder", None) is not None
        return cls(dict(config.items), config.default is not None, shares_others, hasattr(config.save, "staging_config"))

    def is_shared(self, key: str) -> bool:
        """Whether the ranks have an item in common, because it has a resharder."""
        spec = self.items.get(key)
        return self.shares_others if spec is None else getattr(spec, "resharder", None) is not None

    def require_fitting(self, payload: object) -> None:
        """Checks the items of a payload. Raises `UnfitItemsError` if an item is missing, is not allowed, or has no valid key."""
        if not isinstance(payload, Mapping):
            raise InvalidOptionError(f"a checkpoint must be a dict of items by key, not a {type(payload).__name__}", object_id="checkpoint")
        invalid = [key for key in payload if not (isinstance(key, str) and KEY.fullmatch(key))]
        if invalid:
            raise UnfitItemsError(
                f"invalid checkpoint keys {invalid}: a key has only letters, digits, hyphens and underscores", object_id=str(invalid[0])
            )
        missing = sorted(key for key, spec in self.items.items() if getattr(spec, "required", True) and key not in payload)
        if missing:
            raise UnfitItemsError(f"missing required checkpoint item(s): {missing}", object_id=missing[0])
        extra = [] if self.is_open else sorted(set(payload) - set(self.items))
        if extra:
            raise UnfitItemsError(
                f"no ItemSpec for checkpoint key(s) {extra}, and the schema is strict (default=None): declare them in Config.items",
                object_id=extra[0],
            )


def require_id(checkpoint_id: object) -> str:
    """The text of a checkpoint id. Raises `InvalidOptionError` if it is no text, or empty."""
    text = os.fspath(checkpoint_id).rstrip("/") if isinstance(checkpoint_id, str | os.PathLike) else ""
    if not isinstance(text, str) or not text:
        raise InvalidOptionError(f"a checkpoint id is a text such as 'step_1000', not {checkpoint_id!r}", object_id="checkpoint_id")
    return text
