"""Sends a rank's staged files to other hosts and keeps the files of other ranks, both at the same time, once per save.

The sender offers names and sizes; the receiver answers which it takes, or why none; then the files follow in pieces, the manifest last. An
error of a rank's disk, or a copy that takes too long, costs that copy alone; a rank that is gone, or silent for too long, ends replication
permanently. Publishing waits for the exchange; no save fails because of it.
"""

import time
import warnings
from collections.abc import Callable, Sequence

from tensorstore_ck.backend.staging import StagingFolder
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import Helper
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.session.peers.copy_holders import copies_possible, sources_of, targets_of
from tensorstore_ck.session.peers.exchange import Exchange
from tensorstore_ck.session.peers.held_copies import HeldCopies
from tensorstore_ck.session.peers.link import PeerLink, PeerLostError, PeerProtocolError
from tensorstore_ck.session.peers.piece_stream import PIECE_BYTES
from tensorstore_ck.session.peers.receiver import Receiver
from tensorstore_ck.session.peers.sender import Sender


class Replicator:
    """One rank's side. All ranks of a group make theirs with the same hosts and copies; the link serves it alone."""

    def __init__(
        self,
        link: PeerLink,
        folder: StagingFolder,
        hosts: Sequence[bytes],
        copies: int,
        *,
        piece_bytes: int = PIECE_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`link`: made for this replicator by `connect`, with the same hosts and copies. `folder`: of this rank's files, and of those that
        it keeps for others. Four pieces of `piece_bytes` are in memory. `monotonic`: the clock by which a copy is too slow.
        """
        self._link = link
        self._monotonic = monotonic
        self._kept = HeldCopies(folder)
        targets, sources = targets_of(link.rank, hosts, copies), sources_of(link.rank, hosts, copies)
        self._sending = Sender(link, folder, targets, piece_bytes)
        self._keeping = Receiver(link=link, folder=folder, kept=self._kept, sources=sources, piece_bytes=piece_bytes)
        self.is_broken = False
        """Stops all copies, because a rank was lost."""
        possible = copies_possible(hosts, copies)
        if possible < copies and link.rank == 0:
            warnings.warn(
                f"replicate_to_peers={copies} needs {copies + 1} hosts, and the job has {possible + 1}: staged saves have "
                f"{possible or 'no'} copies on other hosts; ranks with the same staging folder count as one host",
                stacklevel=user_stacklevel(),
            )

    def exchange(
        self,
        txn: Ulid,
        manifest: bytes,
        names: Sequence[str],
        *,
        warn: Callable[[str], object],
        on_bytes: Callable[[int], object] = lambda count: None,
    ) -> list[str]:
        """Sends this rank's staged files, and keeps those of other ranks. All ranks call it for the same saves in the same order.

        Args:
            txn: Of the staging, the same on all ranks.
            manifest: This rank's, encoded.
            names: Its objects; those that were uploaded already need no copy.
            warn: Called for each missing copy, with the reason; from two threads.
            on_bytes: Called with the number of bytes sent, once per copy.

        Returns:
            The keys of the manifests of other ranks that are complete here now.

        Raises:
            BackendUnavailableError: a rank is gone or too slow. Raised once: later calls do nothing.
        """
        if self.is_broken:
            return []
        self._kept.expect(txn)
        exchange = Exchange(
            txn=txn,
            manifest=manifest,
            names=names,
            on_bytes=on_bytes,
            warn=warn,
            patience_seconds=self._link.timeout_seconds,
            monotonic=self._monotonic,
        )
        errors: list[BaseException] = []
        keys: list[str] = []

        def guarded(work: Callable[[Exchange], None]) -> None:
            try:
                work(exchange)
            except BaseException as exc:  # noqa: BLE001 - raised below, when the other direction has ended
                errors.append(exc)
                if isinstance(exc, PeerProtocolError) or not isinstance(exc, PeerLostError):
                    self._link.break_off()  # others may wait for this rank

        sending = Helper(lambda: guarded(self._sending.run), "tsck-peers")
        sending.start()
        guarded(lambda exchange: keys.extend(self._keeping.run(exchange)))
        sending.join()
        if errors:
            self.is_broken = True
            self._link.break_off()
        for error in errors:
            if not isinstance(error, PeerLostError):
                raise error
        if errors:
            raise self._ended(errors[0]) from errors[0]
        return keys

    def forget(self, txn: Ulid) -> None:
        """Deletes the copies of a snapshot that was published or given up.

        Raises:
            StoreError: the folder cannot be written to.
        """
        self._kept.forget(txn)

    def _ended(self, error: BaseException) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"saves that rank {self._link.rank} stages get no more copies on other hosts until the job is restarted: {error}; "
            "staging on its own host, and the upload, go on",
            object_id="replicate_to_peers",
        )
