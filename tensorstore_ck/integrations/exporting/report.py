"""The report of an export."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorstore_ck.log.snapshot import Snapshot


class ExportedFile(NamedTuple):
    """A written file."""

    name: str
    """Its name in the target folder, or that of the target file."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written. Every byte was read back and compared, and is durable."""

    format: str
    path: str
    snapshot: Snapshot
    files: tuple[ExportedFile, ...]
    tensors: int
    """Names of tensors and arrays in the files, including those that share memory."""
    tensor_bytes: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Path in the state -> why the format does not hold it."""
    notes: tuple[str, ...] = ()
    """Hints for readers of the files."""

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)
