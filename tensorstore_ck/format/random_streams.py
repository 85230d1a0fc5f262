"""Random streams for ranks that have none of their own to go on with: derived from a snapshot by a stated rule.

A job that goes on with another number of ranks cannot restore each rank's generators. Seeds from here follow from the snapshot's root,
so whoever restores the same snapshot on as many ranks gets the same; and another rank, number of ranks or name gives another stream.
Each record of a snapshot with rank states says which rule is meant (FORMAT.md, "Derived streams").
"""

import struct
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.common.ids import derived_hash
from tensorstore_ck.errors import FormatVersionError

RULE: Final = "blake3-v1"


@dataclass(frozen=True, slots=True)
class Streams:
    """One rank's new random streams: ``torch.manual_seed(streams.seed("torch"))``. Make it with `Store.streams`."""

    root: str
    """Of the snapshot that the job goes on from."""
    rank: int
    world_size: int
    """How many ranks there are now."""
    rule: str = RULE
    """How seeds are derived, as the snapshot says."""

    def __post_init__(self) -> None:
        """Refuses a rule of a newer build."""
        if self.rule != RULE:
            raise FormatVersionError(
                f"snapshot {self.root[:16]} derives random streams by the rule {self.rule!r}, which needs a newer build of tensorstore_ck",
                object_id=self.root,
            )

    def seed(self, name: str) -> int:
        """The seed of a stream, from 0 to 2^64 - 1: for each generator another name (numpy's ``np.random.seed`` takes it modulo 2^32)."""
        key = struct.pack("<II", self.rank, self.world_size)
        return int.from_bytes(derived_hash("stream", bytes.fromhex(self.root), key, name.encode())[:8], "little")
