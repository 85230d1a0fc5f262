"""The tensors of a snapshot as a tree of groups, by the dots in their names."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tensorstore_ck.log.snapshot import GroupCost, SnapshotDetails

MAX_DEPTH: Final = 32
"""Of groups; a name with more dots keeps the rest of them."""


class TensorRow(NamedTuple):
    """A tensor."""

    path: str
    """Its full name."""
    name: str
    """In its group."""
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    stored_bytes: int | None
    codecs: str
    """Those of its blocks; empty: all bytes are in the snapshot's tables."""
    placement: str
    """How the ranks that saved it held it; empty: each held all of it."""

    @property
    def shape_text(self) -> str:
        """As people write it."""
        return " \N{MULTIPLICATION SIGN} ".join(f"{size}" for size in self.shape) or "scalar"


@dataclass(slots=True)
class TensorGroup:
    """Tensors whose names begin with the same path."""

    path: str
    name: str
    count: int = 0
    size_bytes: int = 0
    entries: "list[TensorGroup | TensorRow]" = field(default_factory=list)
    """In the state's order."""
    groups: "dict[str, TensorGroup]" = field(default_factory=dict)

    def tensors(self) -> Iterator[TensorRow]:
        """All of them, in the state's order of groups."""
        stack = [iter(self.entries)]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
            elif isinstance(entry, TensorRow):
                yield entry
            else:
                stack.append(iter(entry.entries))

    def shown(self) -> "list[tuple[str, TensorGroup | TensorRow]]":
        """The entries with their names. A group with a single entry is merged with it."""
        shown: list[tuple[str, TensorGroup | TensorRow]] = []
        for entry in self.entries:
            name = entry.name
            while isinstance(entry, TensorGroup) and len(entry.entries) == 1:
                (entry,) = entry.entries
                name = f"{name}.{entry.name}"
            shown.append((name, entry))
        return shown

    def find(self, path: str) -> "TensorGroup | None":
        """The group at a path; the whole tree at an empty one."""
        group: TensorGroup | None = self
        for name in path.split(".", MAX_DEPTH) if path else ():
            group = group.groups.get(name) if group is not None else None
        return group


def tensor_tree(details: SnapshotDetails, costs: Mapping[str, GroupCost]) -> TensorGroup:
    """The tree of all tensors; `costs`: of each."""
    root = TensorGroup("", "")
    for path, dtype, shape, size_bytes in details.tensors:
        *parents, name = path.split(".", MAX_DEPTH)
        group, at = root, ""
        group.count += 1
        group.size_bytes += size_bytes
        for parent in parents:
            at = f"{at}.{parent}" if group is not root else parent
            child = group.groups.get(parent)
            if child is None:
                child = group.groups[parent] = TensorGroup(at, parent)
                group.entries.append(child)
            group = child
            group.count += 1
            group.size_bytes += size_bytes
        cost = costs.get(path)
        codecs = codecs_text(cost) if cost is not None else ""
        stored = cost.stored_bytes if cost is not None else None
        group.entries.append(TensorRow(path, name, dtype, shape, size_bytes, stored, codecs, details.placements.get(path, "")))
    return root


def codecs_text(cost: GroupCost) -> str:
    """``fast 80%, raw 20%``, by raw bytes."""
    total = sum(cost.codecs.values())
    shares = sorted(cost.codecs.items(), key=lambda share: -share[1])
    return ", ".join(name if len(shares) == 1 else f"{name} {size / total:.0%}" for name, size in shares)


def matching(tensors: Iterable[TensorRow], text: str) -> list[TensorRow]:
    """The tensors whose names contain `text`, ignoring case; ``*`` stands for any characters, ``?`` for any one."""
    pieces = [re.compile(re.escape(piece).replace(r"\?", "."), re.IGNORECASE | re.DOTALL) for piece in text.split("*") if piece]
    return [tensor for tensor in tensors if _has_in_order(tensor.path, pieces)]


def _has_in_order(name: str, pieces: Sequence[re.Pattern[str]]) -> bool:
    """Searches the pieces one after another: a pattern with ``.*`` for each star would backtrack through all combinations."""
    at = 0
    for piece in pieces:
        match = piece.search(name, at)
        if match is None:
            return False
        at = match.end()
    return True
