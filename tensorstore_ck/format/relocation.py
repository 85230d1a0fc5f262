"""Relocation maps ("moved objects"): which entries of one pack are in other packs now. Only the format: bytes in, bytes out.

Compaction and repair write one for each pack that they copy from; a `relocate` operation puts it in force. Parts never change:
`engine.reachability` and `engine.read.block_reader` follow the relocations of their blocks. Format: FORMAT.md, "Moved objects".
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import ULID_BYTES, Digest, Ulid, split_ulids
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.pack import HEADER, MAX_BLOCK_BYTES, MAX_ENTRIES
from tensorstore_ck.format.sealed import object_hash, seal, take, unseal

RELOCATION_DTYPE: Final = np.dtype(
    [
        ("from", "<u4"),
        ("target", "<u4"),
        ("entry", "<u4"),
        ("stored", "<u4"),
        ("offset", "<u8"),
        ("codec", "<u2"),
        ("flags", "<u2"),
        ("pad", "<u4"),
    ]
)
"""Entry ``from`` is now entry ``entry`` of the pack at position ``target`` of `targets`. Flag 1: it lost its delta base."""

Rows = npt.NDArray[np.void]


class RelocationMap(NamedTuple):
    """One decoded moved object."""

    pack: Ulid
    targets: Sequence[Ulid]
    rows: Rows
    """Rows of `RELOCATION_DTYPE`, by ``from``."""
    location: str | None = None
    """URL of the cold location that holds the targets; None: the store itself. Only `salvage` reads it; all other code uses the log."""

    def encode(self) -> bytes:
        """The sealed object."""
        location = {} if self.location is None else {"place": self.location}
        return seal("moved", {"pack": self.pack, "targets": b"".join(self.targets), "rows": self.rows.tobytes(), **location})


def decode_relocation(data: bytes, name: str, expected: Digest) -> RelocationMap:
    """Decodes and checks the moved object that a log entry names by the hash `expected`.

    Raises:
        CorruptObjectError: another object, or its fields contradict each other.
    """
    body = unseal("moved", data, name)
    if object_hash(data) != expected:
        raise CorruptObjectError(f"{name} is not the moved object that the log names: run `tsck fsck --repair`", object_id=name)
    try:
        pack, joined = take(body, "pack", bytes), take(body, "targets", bytes)
        rows = np.frombuffer(take(body, "rows", bytes), RELOCATION_DTYPE)
    except (TypeError, ValueError) as exc:
        raise CorruptObjectError(f"{name} is not a valid moved object: {exc!r}", object_id=name) from exc
    targets = split_ulids(joined)
    if (
        len(pack) != ULID_BYTES
        or len(joined) % ULID_BYTES
        or not 0 < len(rows) <= MAX_ENTRIES
        or np.any(rows["from"][1:] <= rows["from"][:-1])
        or int(rows["target"].max()) >= len(targets)
        or int(rows["offset"].min()) < HEADER.size
        or int(rows["stored"].max()) > MAX_BLOCK_BYTES
    ):
        raise CorruptObjectError(f"{name} is not a valid moved object", object_id=name)
    location = body.get("place")
    if location is not None and not (type(location) is str and location.isprintable()):
        raise CorruptObjectError(f"{name} has a malformed location", object_id=name)
    return RelocationMap(Ulid(pack), targets, rows, location)
