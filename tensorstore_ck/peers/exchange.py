"""One exchange: what it is about, whether its caller still wants it, and what both of its sides agree on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tensorstore_ck.ids import Ulid
from tensorstore_ck.peers.pieces import piece_lengths


class StoppedError(Exception):
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
            raise StoppedError(str(exc)) from exc


def stream_lengths(sizes: Sequence[int], manifest_bytes: int, piece_bytes: int) -> list[int]:
    """The pieces in which objects of those sizes, and a manifest, travel."""
    return [length for size in (*sizes, manifest_bytes) for length in piece_lengths(size, piece_bytes)]
