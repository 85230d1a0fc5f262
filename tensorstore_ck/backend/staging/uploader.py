"""Uploads unsent objects to the store: complete objects and pieces are not sent again after a crash.

The journal is written before the first byte of an object is sent, and when the object is complete. A store with resumable uploads
reports which pieces it has; in any other one an object appears whole or not at all. One process at a time uploads a file, but another one
may have published it: nothing in the store is deleted or replaced.
Bytes are verified before they leave the disk (`unsent_file`): the pieces that the store has were verified by the process that sent them.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.resumable_upload import resumable
from tensorstore_ck.backend.staging.folder import StagingFolder
from tensorstore_ck.backend.staging.unsent_file import StagedDamageError, verify_all
from tensorstore_ck.backend.staging.upload_pass import UploadPass
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.common.retry import JITTER, OnRetry, RetryPolicy
from tensorstore_ck.errors import BackendUnavailableError, DamageError, InvalidOptionError, StoreError

MAX_PARALLEL_REQUESTS: Final = 4


@dataclass(eq=False, repr=False)
class Uploader:
    """Uploads from one staging folder to one store."""

    folder: StagingFolder
    store: Backend
    max_parallel_requests: int = MAX_PARALLEL_REQUESTS
    limit: RateLimit | None = None
    """All uploads of this process share it."""
    sleep: Callable[[float], object] = time.sleep
    jitter: Callable[[], float] = JITTER

    def __post_init__(self) -> None:
        if self.max_parallel_requests < 1:
            text = f"max_parallel_requests must be 1 or more, not {self.max_parallel_requests}"
            raise InvalidOptionError(text, object_id="max_parallel_requests")

    def upload(
        self,
        names: Iterable[str],
        *,
        stop: Callable[[], object] = lambda: None,
        on_bytes: Callable[[int], object] = lambda count: None,
        on_retry: OnRetry = lambda error, seconds: None,
    ) -> list[str]:
        """Returns when every object is durable in the store, under the name that the journal says. Retries transient faults without end.

        Args:
            names: Unsent objects, in the order in which they begin. Those that are no longer unsent must be in the store.
            stop: Raises to cancel; called often, by any thread. A running request is waited for.
            on_bytes: Called by one thread at a time with the number of bytes that are in the store; a negative number takes back bytes
                that have to be sent again. The sum is the objects' size at the end.
            on_retry: Called with transient faults, by any thread.

        Returns:
            The objects that are not in the store, since another object has their name there: see `UploadPass.taken`.

        Raises:
            MissingObjectError: an object is neither here nor in the store.
            StagedDamageError: the staging disk damaged an object, and the store does not have it.
            StoreError: the store refused, or the staged file cannot be read.
        """
        left = list(dict.fromkeys(names))
        taken: list[str] = []
        attempt = reported_bytes = 0

        def report(count: int) -> None:
            nonlocal reported_bytes
            reported_bytes += count
            on_bytes(count)

        while left:
            policy = RetryPolicy(stop, on_retry, sleep=self.sleep, jitter=self.jitter)
            upload_pass = UploadPass(folder=self.folder, store=self.store, policy=policy, limit=self.limit, on_bytes=report)
            try:
                left = upload_pass.run(left, self.max_parallel_requests)
            except StagedDamageError as exc:
                self._replace_damaged(exc, stop, on_retry)
                report(-reported_bytes)
                continue
            taken += upload_pass.taken
            if left:
                policy.pause(policy.delay(attempt))
                attempt += 1
        return taken

    def replace(self, name: str, data: Buffer) -> None:
        """Writes an unsent object again, which the disk damaged."""
        self.folder.unsent.replace(name, data)

    def drop(self, names: Iterable[str]) -> None:
        """Deletes unsent objects and, if the store answers, their sent pieces; gc frees complete ones. They must not be in upload."""
        store = resumable(self.store)
        for name in names:
            entry = self.folder.journal.read(name)
            if store is not None and entry is not None and entry.token and not entry.is_complete:
                try:
                    store.give_up_upload(entry.store_name, entry.token)
                except BackendUnavailableError:
                    store = None  # gc removes the pieces like those of other interrupted writes
                except StoreError:
                    pass
            self.folder.unsent.delete([name])
            self.folder.journal.delete([name])

    def _replace_damaged(self, error: StagedDamageError, stop: Callable[[], object], on_retry: OnRetry) -> None:
        """Drops a damaged object that the store has, whole: uploaded by an earlier process, or by one with another copy.

        Raises:
            StagedDamageError: `error`; the store does not have it.
        """
        name, policy = error.object_id, RetryPolicy(stop, on_retry, sleep=self.sleep, jitter=self.jitter)
        entry = self.folder.journal.read(name)
        if entry is not None and entry.stored_as:  # `drop` would forget that name
            raise error
        read = partial(self.store.read_into, name)
        try:
            size_bytes = policy.call(lambda: self.store.size(name))
            policy.call(lambda: verify_all(self.folder.open_verifier(name, size_bytes, read), size_bytes, read))
        except DamageError:
            raise error from None
        self.drop([name])
