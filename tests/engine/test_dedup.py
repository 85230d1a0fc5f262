"""What a save relies on instead of writing it again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import DamageError
from tensorstore_ck.log.cache import Batch, MemoryTable
from tests.gc.stores import TENSOR_BYTES, open_store, same, state, tensor


class Reads(MemoryBackend):
    """Notes what is read besides the log."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def get(self, name: str, *, max_bytes: int) -> bytes:
        if not name.startswith("log/"):
            self.names.append(name)
        return super().get(name, max_bytes=max_bytes)


class Lookups(MemoryTable):
    """Notes how many keys each lookup of several has, and counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.batches = 0

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        self.sizes.append(len(keys))
        return super().get_many(keys)

    @contextmanager
    def batch(self, *, wait: bool = True) -> Iterator[Batch]:
        self.batches += 1
        with super().batch(wait=wait) as batch:
            yield batch


def test_a_save_makes_its_blocks_known_to_other_jobs_in_the_batch_that_folds_its_entry() -> None:
    backend, table = MemoryBackend(), Lookups()
    store, other = open_store(backend, table=table), open_store(backend, table=table)
    store.put_snapshot(state(1), ref="job", step=1)
    before = table.batches
    store.put_snapshot(state(2), ref="job", step=2)
    assert table.batches - before == 1, "each batch waits for the disk"
    assert other.put_snapshot(state(2), ref="other", step=1).new_bytes < TENSOR_BYTES


def test_blocks_in_a_pack_that_was_cut_off_are_written_again() -> None:
    backend = MemoryBackend()
    root = open_store(backend).put_snapshot(state(1), ref="job", step=1).root
    (pack,) = [info.name for info in backend.list("packs/")]
    backend.replace(pack, backend.get(pack, max_bytes=1 << 20)[:1000])
    store = open_store(backend)
    store.put_snapshot(state(1), ref="job", step=2, expect=root)
    assert same(store.checkout("job@2"), state(1))
    with pytest.raises(DamageError):
        store.checkout("job@1")


def test_a_save_reads_nothing_of_the_save_before_by_the_same_handle() -> None:
    backend = Reads()
    store = open_store(backend)
    store.put_snapshot(state(1, 2), ref="job", step=1)
    backend.names.clear()
    store.put_snapshot(state(1, 3), ref="job", step=2)
    assert backend.names == []


def test_the_new_blocks_of_a_run_are_looked_up_at_once() -> None:
    table = Lookups()
    store = open_store(table=table)
    store.put_snapshot(state(*range(20)), ref="job", step=1)
    table.sizes.clear()
    changed = {f"t{number}": tensor(100 + number) for number in range(20)}
    store.put_snapshot(changed, ref="job", step=2)
    assert table.sizes == [20]


def test_a_block_that_a_run_has_twice_is_written_once() -> None:
    store = open_store()
    one = store.put_snapshot({"a": tensor(1)}, ref="one", step=1)
    two = store.put_snapshot({"a": tensor(2), "b": tensor(2)}, ref="two", step=1)
    assert same(store.checkout("two"), {"a": tensor(2), "b": tensor(2)})
    assert two.new_bytes < one.new_bytes + TENSOR_BYTES // 2
