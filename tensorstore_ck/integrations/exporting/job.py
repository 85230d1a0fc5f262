"""What a format's writer is given, and what it tells."""

from collections.abc import Mapping
from typing import NamedTuple

from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.format.tree import Tree
from tensorstore_ck.integrations.exporting.atomic_target import AtomicTarget


class ExportJob(NamedTuple):
    """One export."""

    content: SnapshotContent
    tree: Tree
    """What of the content is wanted."""
    metadata: Mapping[str, object]
    """The snapshot's."""
    folder: str
    """The files go here; it takes the target's place later."""
    target: AtomicTarget
    max_file_bytes: int


class WrittenExport(NamedTuple):
    """What was written; see `ExportReport`."""

    tensors: int
    tensor_bytes: int
    left_out: dict[str, str]
    notes: list[str]
