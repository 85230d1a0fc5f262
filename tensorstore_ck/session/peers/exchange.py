"""One exchange: what it is about, whether its caller still wants it, and what both of its sides agree on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.session.peers.piece_stream import piece_lengths

SLOWEST_BYTES_PER_SECOND: Final = 16 << 20
"""A copy that comes more slowly is given up, as what is staged waits for it: a tenth of what a rank has of a slow network."""


class CancelledError(Exception):
    """The caller does not want it any more."""


@dataclass(slots=True)
class Exchange:
    """See `Replicator.exchange`."""

    txn: Ulid
    manifest: bytes
    names: Sequence[str]
    stop: Callable[[], object]
    on_bytes: Callable[[int], object]
    warn: Callable[[str], object]
    patience_seconds: float
    """What a copy may take beyond that."""
    monotonic: Callable[[], float]
    stopped: BaseException | None = None
    """What `stop` raised."""

    def go_on(self) -> None:
        """Asks the caller.

        Raises:
            StoppedError: it wants no more.
        """
        try:
            self.stop()
        except BaseException as exc:
            self.stopped = exc
            raise CancelledError(str(exc)) from exc

    def go_on_for(self, peer: int, size_bytes: int) -> Callable[[], None]:
        """`go_on` for a copy to or from a peer, who may be just fast enough for each piece, and hold up the whole for ever.

        What it gives raises BackendUnavailableError when the copy has taken too long, and StoppedError as `go_on` does.
        """
        seconds = self.patience_seconds + size_bytes / SLOWEST_BYTES_PER_SECOND
        end = self.monotonic() + seconds

        def go_on() -> None:
            self.go_on()
            if self.monotonic() > end:
                raise BackendUnavailableError(
                    f"{human_bytes(size_bytes)} took more than {seconds:.0f} s between this rank and rank {peer}",
                    object_id="replicate_to_peers",
                )

        return go_on


def stream_lengths(sizes: Sequence[int], manifest_bytes: int, piece_bytes: int) -> list[int]:
    """The pieces in which objects of those sizes, and a manifest, travel."""
    return [length for size in (*sizes, manifest_bytes) for length in piece_lengths(size, piece_bytes)]
