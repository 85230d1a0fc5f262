"""What an export reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorstore_ck.log.snapshot import Snapshot


class ExportedFile(NamedTuple):
    """One file that was written."""

    name: str
    """In the target folder; of a target that is one file, that file's."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written; every byte of it was read back from the files and compared, and is durable."""

    format: str
    path: str
    snapshot: Snapshot
    files: tuple[ExportedFile, ...]
    tensors: int
    """Names of tensors and arrays in the files; those that share memory count each."""
    tensor_bytes: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Path in the state -> why the format does not hold it."""
    notes: tuple[str, ...] = ()
    """What a reader of the files should know."""

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)
