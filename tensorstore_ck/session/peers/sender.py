"""The sender's side of an exchange: this rank's unsent objects, and its manifest, to one target after the other.

If a target does not want them, or a file cannot be read, a copy is missing and a warning says so. In any case each target learns in its
turn what follows, or that nothing does.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Final

from tensorstore_ck.backend.staging import StagingFolder
from tensorstore_ck.backend.staging.unsent_file import UnsentFile
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import MissingObjectError, StoreError
from tensorstore_ck.redaction import one_line
from tensorstore_ck.session.peers.exchange import Exchange, stream_lengths
from tensorstore_ck.session.peers.link import BACK, FORTH, PeerLink
from tensorstore_ck.session.peers.piece_stream import PieceSender, ReceiverAbortedError, make_buffers, piece_lengths

_REASON_CHARS: Final = 500


class Sender:
    """Sends this rank's files."""

    def __init__(self, link: PeerLink, folder: StagingFolder, targets: Sequence[int], piece_bytes: int) -> None:
        self._link = link
        self._folder = folder
        self._targets = targets
        self._piece_bytes = piece_bytes
        self._buffers = make_buffers(piece_bytes)

    def run(self, exchange: Exchange) -> None:
        """Returns when every target has the files that it accepts.

        Raises:
            PeerLostError: a target is gone.
        """
        with ExitStack() as stack:
            files: list[UnsentFile] | None
            try:  # open files stay readable after they are moved
                files = [stack.enter_context(closing(file)) for file in self._unsent(exchange.names)]
            except StoreError as exc:
                exchange.warn(f"no host keeps a copy of the save that rank {self._link.rank} staged: {exc}")
                files = None
            for target in self._targets:
                if files is None:
                    self._link.send_record(target, FORTH, {"txn": exchange.txn})
                else:
                    self._offer(target, files, exchange)

    def _unsent(self, names: Sequence[str]) -> Iterator[UnsentFile]:
        for name in dict.fromkeys(names):
            try:
                yield self._folder.open_unsent(name)
            except MissingObjectError:
                continue  # it is in the store

    def _offer(self, target: int, files: Sequence[UnsentFile], exchange: Exchange) -> None:
        sizes = {file.name: file.size_bytes for file in files}
        self._link.send_record(target, FORTH, {"txn": exchange.txn, "sizes": sizes, "manifest_bytes": len(exchange.manifest)})
        answer = self._link.receive_record(target, BACK)
        wanted = answer.get("wanted")
        try:
            if type(wanted) is not list:
                raise ReceiverAbortedError(str(answer.get("refused"))[:_REASON_CHARS])
            names = {name for name in wanted if type(name) is str}
            self._send(target, [file for file in files if file.name in names], exchange)
        except (ReceiverAbortedError, StoreError) as exc:
            copy = f"copy of the {human_bytes(sum(sizes.values()))} that rank {self._link.rank} staged"
            exchange.warn(f"rank {target} keeps no {copy}: {one_line(str(exc))}")

    def _send(self, target: int, files: Sequence[UnsentFile], exchange: Exchange) -> None:
        lengths = stream_lengths([file.size_bytes for file in files], len(exchange.manifest), self._piece_bytes)
        pieces = PieceSender(self._link, target, self._buffers, lengths)

        def copy_manifest(offset: int, buffer: memoryview) -> None:
            buffer[:] = exchange.manifest[offset : offset + len(buffer)]

        objects = [*((file.size_bytes, file.read_into) for file in files), (len(exchange.manifest), copy_manifest)]
        check_time = exchange.time_limit(target, sum(lengths))
        try:
            for size_bytes, read_into in objects:
                offset = 0
                for length in piece_lengths(size_bytes, self._piece_bytes):
                    check_time()
                    read_into(offset, pieces.buffer())
                    offset += length
                    pieces.send()
                    exchange.on_bytes(length)
            pieces.finish()
        except StoreError:
            pieces.give_up()
            raise
