"""The receiver's side of an exchange: the files of one source after the other, checked as they come, written like this rank's own.

A source is trusted no more than a store: names must be those of staged objects, sizes are checked before space is reserved, the manifest
must be the source's own. An offer that cannot be kept is refused, and the next source follows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from tensorstore_ck.backend.object_names import check_name
from tensorstore_ck.backend.protocol import writing
from tensorstore_ck.backend.staging import StagingFolder
from tensorstore_ck.backend.staging.folder import MAX_MANIFEST_BYTES
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import CorruptObjectError, StoreError
from tensorstore_ck.format.sealed import Body, take, take_count
from tensorstore_ck.redaction import one_line
from tensorstore_ck.session.peers.exchange import Exchange, stream_lengths
from tensorstore_ck.session.peers.held_copies import HeldCopies
from tensorstore_ck.session.peers.link import BACK, FORTH, PeerLink, PeerProtocolError
from tensorstore_ck.session.peers.piece_stream import ForgedPieceError, PieceReceiver, SenderAbortedError, make_buffers, piece_lengths
from tensorstore_ck.session.staging.manifest import STAGED_FOLDERS, manifest_key


class Receiver:
    """Receives and keeps the files of other ranks."""

    def __init__(self, link: PeerLink, folder: StagingFolder, kept: HeldCopies, sources: Sequence[int], piece_bytes: int) -> None:
        self._link = link
        self._folder = folder
        self._kept = kept
        self._sources = sources
        self._piece_bytes = piece_bytes
        self._buffers = make_buffers(piece_bytes)

    def run(self, exchange: Exchange) -> list[str]:
        """The keys of the manifests that are complete here.

        Raises:
            PeerLostError: a source is gone.
        """
        return [manifest_key(exchange.txn, source) for source in self._sources if self._keep(source, exchange)]

    def _keep(self, source: int, exchange: Exchange) -> bool:
        offer = self._link.receive_record(source, FORTH)
        if offer.get("txn") != exchange.txn:
            raise PeerProtocolError(f"rank {source} stages another snapshot; all ranks must stage the same ones in the same order")
        if "sizes" not in offer:
            return False
        try:
            return self._answer(source, offer, exchange)
        finally:
            self._kept.end(exchange.txn, manifest_key(exchange.txn, source))

    def _answer(self, source: int, offer: Body, exchange: Exchange) -> bool:
        try:
            sizes, manifest_bytes = _checked(offer, f"the offer of rank {source}")
            wanted = {name: sizes[name] for name in self._kept.begin(exchange.txn, manifest_key(exchange.txn, source), sizes)}
            self._folder.evict(sum(wanted.values()) + manifest_bytes)
        except StoreError as exc:
            self._link.send_record(source, BACK, {"refused": one_line(str(exc))})
            return False
        self._link.send_record(source, BACK, {"wanted": list(wanted)})
        lengths = stream_lengths(list(wanted.values()), manifest_bytes, self._piece_bytes)
        pieces = PieceReceiver(self._link, source, self._buffers, lengths)
        check_time = exchange.time_limit(source, sum(lengths))
        try:
            key = manifest_key(exchange.txn, source)
            for name, size in wanted.items():
                self._keep_object(self._verified(pieces, name, size, check_time), name)
                self._kept.add(name, size)
            manifest = b"".join(map(bytes, self._verified(pieces, key, manifest_bytes, check_time)))
            is_complete = self._kept.complete(exchange.txn, key, manifest)
        except SenderAbortedError:
            return False
        except StoreError as exc:
            pieces.refuse()
            copy = f"copy of the {human_bytes(sum(sizes.values()))} that rank {source} staged"
            exchange.warn(f"rank {self._link.rank} keeps no {copy}: {exc}")
            return False
        pieces.finish()
        return is_complete

    def _verified(self, pieces: PieceReceiver, name: str, size_bytes: int, check_time: Callable[[], None]) -> Iterator[memoryview]:
        for _ in piece_lengths(size_bytes, self._piece_bytes):
            try:
                piece = pieces.next()
            except ForgedPieceError as exc:
                raise CorruptObjectError(
                    f"{name} was damaged on the way, or another process sent it: its bytes are not those that were sent", object_id=name
                ) from exc
            check_time()
            yield piece

    def _keep_object(self, pieces: Iterator[memoryview], name: str) -> None:
        first = next(pieces)  # before anything can fail: `refuse` needs a piece that came
        with writing(self._folder.unsent, name) as writer:
            for piece in chain([first], pieces):
                writer.append([piece])


def _checked(offer: Body, what: str) -> tuple[Mapping[str, int], int]:
    """The objects' sizes, and the manifest's.

    Raises:
        CorruptObjectError: the offer is malformed.
    """
    try:
        sizes, manifest_bytes = take(offer, "sizes", dict), take_count(offer, "manifest_bytes")
        for name in sizes:
            take_count(sizes, check_name(name))
    except (TypeError, ValueError) as exc:
        raise CorruptObjectError(f"{what} is malformed: {exc}", object_id=what) from exc
    if not all(name.startswith(STAGED_FOLDERS) for name in sizes) or manifest_bytes > MAX_MANIFEST_BYTES:
        raise CorruptObjectError(f"{what} has names or sizes that no staged file has", object_id=what)
    return sizes, manifest_bytes
