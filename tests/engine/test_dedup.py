"""What a save relies on instead of writing it again."""

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import DamageError
from tests.gc.stores import open_store, same, state


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
