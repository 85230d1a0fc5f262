"""One exchange: its snapshot, the time that a copy may take, and the lengths of the pieces, which both sides compute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.session.peers.piece_stream import piece_lengths

SLOWEST_BYTES_PER_SECOND: Final = 16 << 20
"""Slower copies are given up, since publishing waits for them. This is a tenth of a rank's share of a slow network."""


@dataclass(slots=True)
class Exchange:
    """See `Replicator.exchange`."""

    txn: Ulid
    manifest: bytes
    names: Sequence[str]
    on_bytes: Callable[[int], object]
    warn: Callable[[str], object]
    patience_seconds: float
    """The time left for a copy."""
    monotonic: Callable[[], float]

    def time_limit(self, peer: int, size_bytes: int) -> Callable[[], None]:
        """For a copy to or from a peer, which may be fast enough for each piece and still too slow for all.

        The returned function raises BackendUnavailableError when the copy has taken too long.
        """
        seconds = self.patience_seconds + size_bytes / SLOWEST_BYTES_PER_SECOND
        end = self.monotonic() + seconds

        def check() -> None:
            if self.monotonic() > end:
                raise BackendUnavailableError(
                    f"{human_bytes(size_bytes)} took more than {seconds:.0f} s between this rank and rank {peer}",
                    object_id="replicate_to_peers",
                )

        return check


def stream_lengths(sizes: Sequence[int], manifest_bytes: int, piece_bytes: int) -> list[int]:
    """The lengths of the pieces in which objects of these sizes and a manifest are sent."""
    return [length for size in (*sizes, manifest_bytes) for length in piece_lengths(size, piece_bytes)]
