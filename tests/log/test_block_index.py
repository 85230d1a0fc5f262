"""The block index: what cannot be noted at once, as another process has the table, is noted when that one is done."""

from collections.abc import Iterator
from contextlib import contextmanager

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import Digest, new_ulid
from tensorstore_ck.log.block_index import BlockIndex, Location
from tensorstore_ck.log.cache import Batch, MemoryTable, TableBusyError
from tests.log.scripted import append_puts, open_log


class Contended(MemoryTable):
    """Another process is in a batch whenever this one does not wait."""

    @contextmanager
    def batch(self, *, wait: bool = True) -> Iterator[Batch]:
        if not wait:
            raise TableBusyError("the test's other process", object_id="cache")
        with super().batch() as batch:
            yield batch


def test_what_waits_for_the_lock_is_noted() -> None:
    table = Contended()
    append_puts(open_log(MemoryBackend(), table), 3)
    index, block = BlockIndex(table), Digest(bytes(range(32)))
    location = Location(new_ulid(), 0, 64, 100, 100, 0)
    index.add([(block, location)], published_at=3)
    index.close()
    assert index.find([block]) == {block: location}
