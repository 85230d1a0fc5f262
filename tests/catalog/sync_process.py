"""A process that syncs: `python -m tests.catalog.sync_process STORE CACHE CATALOG [die-after BATCHES]`."""

import os
import signal
import sys

import tensorstore_ck as tsck
from tensorstore_ck.catalog import Catalog, row_writer


def die_after(batches: int) -> None:
    """The process is killed in the middle of a batch: its rows are written, and not committed."""
    left = [batches]
    write = row_writer.RowWriter.write

    def dying(self: row_writer.RowWriter, *args: object) -> int:
        found = write(self, *args)  # type: ignore[arg-type]
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    row_writer.RowWriter.write = dying  # type: ignore[method-assign, assignment]


def main() -> None:
    store_url, cache, catalog_url, *rest = sys.argv[1:]
    if rest:
        die_after(int(rest[0]))
    with tsck.open(store_url, cache_dir=cache) as store, Catalog(catalog_url, batch_entries=5) as catalog:
        print(catalog.sync(store).head_n)


if __name__ == "__main__":
    main()
