"""Frees what the policy of a job's branch dropped while the job runs, so that a limit on snapshots also bounds their bytes."""

import shlex
import threading
import warnings
from typing import Final

from tensorstore_ck.common.threads import Helper
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import StoreError
from tensorstore_ck.store import Store

SAVES: Final = 4
"""The saves between two runs. Each run adds a few entries to the log, and reads the parts of new snapshots."""


class DroppedSnapshots:
    """Frees in a thread of the first rank. The store holds the snapshots that the policy keeps, and up to four more."""

    def __init__(self, store: Store, ref: str) -> None:
        self._store, self._ref = store, ref
        self._saves = 0
        self._thread: threading.Thread | None = None

    def note_save(self) -> None:
        """Notes that a save began. It may end after the run that it starts; the next run frees what it drops."""
        self._saves += 1
        if self._saves >= SAVES and (self._thread is None or not self._thread.is_alive()):
            self._saves = 0
            self._thread = Helper(self._free, "tsck-free-dropped")
            self._thread.start()

    def finish(self) -> None:
        """Frees what is left. Called when the last save has ended."""
        if self._thread is not None:
            self._thread.join()
        if self._saves or self._thread is not None:
            self._free()
        self._saves, self._thread = 0, None

    def _free(self) -> None:
        try:
            self._store.free_dropped(self._ref)
        except StoreError as exc:
            warnings.warn(
                f"the snapshots that the policy of {self._ref!r} dropped still take space: {exc}; a later save tries again, and "
                f"`tsck gc -s {shlex.quote(self._store.url)}` frees them after their undo window",
                stacklevel=user_stacklevel(),
            )
