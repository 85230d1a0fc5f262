"""A save in progress as a `Future`, which some trainers expect."""

from concurrent.futures import Future

from tensorstore_ck.errors import StoreError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save import PendingSnapshot


def future_of(pending: PendingSnapshot) -> Future[Snapshot]:
    """The published snapshot of a save."""
    future: Future[Snapshot] = Future()
    future.set_running_or_notify_cancel()

    def end(ended: PendingSnapshot) -> None:
        if ended.snapshot is not None:
            future.set_result(ended.snapshot)
        else:
            future.set_exception(ended.error or StoreError("the save ended without a snapshot"))

    pending.published.on_settled(end)
    return future
