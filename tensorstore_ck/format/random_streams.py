"""Derives seeds of random generators from a snapshot, for jobs that resume on another number of ranks.

Such a job cannot restore each rank's generators. The seeds follow from the snapshot's root, the rank, the number of ranks and the
stream's name, so they are reproducible and differ between ranks. A snapshot with rank states records the rule (FORMAT.md, "Derived
streams").
"""

import struct
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.common.ids import derived_hash
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import FormatVersionError

RULE: Final = "blake3-v1"


@short_errors
@dataclass(frozen=True, slots=True)
class Streams:
    """One rank's new random streams: ``torch.manual_seed(streams.seed("torch"))``. Make it with `Store.streams`."""

    root: str
    """The root of the snapshot that the job resumes from."""
    rank: int
    world_size: int
    """The number of ranks now."""
    rule: str = RULE
    """The rule that the snapshot names."""

    def __post_init__(self) -> None:
        """Raises a `FormatVersionError` for a newer build's rule."""
        if self.rule != RULE:
            raise FormatVersionError(
                f"snapshot {self.root[:16]} derives random streams by the rule {self.rule!r}, which needs a newer build of tensorstore_ck",
                object_id=self.root,
            )

    def seed(self, name: str) -> int:
        """The seed of a stream, from 0 to 2^64 - 1. Use one name per generator (``np.random.seed`` takes the seed modulo 2^32)."""
        key = struct.pack("<II", self.rank, self.world_size)
        return int.from_bytes(derived_hash("stream", bytes.fromhex(self.root), key, name.encode())[:8], "little")
