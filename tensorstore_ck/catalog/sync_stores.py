"""Syncs several stores in parallel: a store that cannot be read is reported with its error, and stops none of the others."""

from collections.abc import Callable, Sequence
from typing import Final

from tensorstore_ck.catalog.results import SyncOutcome, SyncReport
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.errors import InvalidOptionError, StoreError
from tensorstore_ck.redaction import display_url
from tensorstore_ck.store import ReadOnlyStore

PARALLEL: Final = 8
"""Stores that are read at a time: a sync mostly waits for its store."""

OpenStore = Callable[[str], ReadOnlyStore]


def sync_several(
    urls: Sequence[str],
    open_store: OpenStore,
    sync: Callable[[ReadOnlyStore], SyncReport],
    *,
    parallel: int,
    synced: Callable[[SyncOutcome], object],
) -> tuple[SyncOutcome, ...]:
    """The outcomes in the order of `urls`.

    Args:
        urls: The stores.
        open_store: Opens a store.
        sync: Syncs an open store.
        parallel: How many at a time.
        synced: Called with each outcome as soon as it is known, from any thread.
    """
    if parallel < 1:
        raise InvalidOptionError(f"parallel must be a whole number from 1 on, not {parallel}", object_id="parallel")
    outcomes: dict[int, SyncOutcome] = {}

    def sync_one(number: int) -> None:
        try:
            with open_store(urls[number]) as store:
                outcomes[number] = SyncOutcome(display_url(urls[number]), sync(store), None)
        except StoreError as exc:
            outcomes[number] = SyncOutcome(display_url(urls[number]), None, exc)
        synced(outcomes[number])

    for_each(range(len(urls)), sync_one, min(parallel, max(1, len(urls))))
    return tuple(outcomes[number] for number in range(len(urls)))
