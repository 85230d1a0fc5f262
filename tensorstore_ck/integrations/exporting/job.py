"""The input and the result of a format's writer.

A writer raises `DamageError` if stored data is damaged, or a file does not hold what was written to it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.format.tree import Tree
from tensorstore_ck.integrations.exporting.atomic_target import AtomicTarget

T = TypeVar("T")


class ExportJob(NamedTuple):
    """One export."""

    content: SnapshotContent
    tree: Tree
    metadata: Mapping[str, object]
    """The snapshot's."""
    folder: str
    target: AtomicTarget
    max_file_bytes: int
    stem: str = "model"
    """The beginning of the names of safetensors files in a folder."""
    with_values: bool = True
    """Write values next to a safetensors file."""
    rank_state: Callable[[], Any] = dict
    """Reads what the first rank saved as its own; an empty dict if there is none."""


class WrittenExport(NamedTuple):
    """See `ExportReport`."""

    tensors: int
    tensor_bytes: int
    left_out: dict[str, str]
    notes: list[str]


def split_files(items: Iterable[T], size: Callable[[T], int], max_file_bytes: int) -> list[list[T]]:
    """Groups items, in order, into files of at most `max_file_bytes`; a larger item gets its own file."""
    groups: list[list[T]] = [[]]
    used = 0
    for item in items:
        if groups[-1] and used + size(item) > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += size(item)
    return groups
