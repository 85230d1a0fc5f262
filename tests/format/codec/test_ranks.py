"""Codecs when several ranks save together: differences and roundings of each rank's own blocks."""

from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tests.format.codec import rank_side
from tests.format.codec.rank_side import full_state
from tests.gc.stores import AT_ONCE
from tests.session.group.pool import Pool, make_store

STEPS = 3


@pytest.mark.parametrize("staged", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["at once", "staged"])
def test_ranks_store_differences(pool: Pool, tmp_path: Path, staged: bool) -> None:
    make_store(tmp_path, block_bytes=64 << 10)
    ranks = 2
    found = pool.run(rank_side.put_steps, str(tmp_path), STEPS, ranks, staged, ranks=ranks)
    assert len({tuple(roots) for roots in found}) == 1
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "look") as store:
        for step, root in enumerate(found[0]):
            state = store.checkout(root)
            for group, tensors in full_state(step).items():
                assert all(torch.equal(state[group][name], tensor) for name, tensor in tensors.items())
            groups = {group.name: group.codecs for group in store.show(root).groups}
            assert groups["weights"].keys() == {"cast"}
            assert groups["masters"].keys() == ({"delta"} if step else {"planes"})
        last = store.log("job")[0]
        assert last.new_bytes < 0.5 * last.logical_bytes
        store.forget("job@0", "job@1")
        store.gc(AT_ONCE)
        assert store.fsck(read_data=True).ok
    assert pool.run(rank_side.restore, str(tmp_path), found[0][-1], STEPS - 1, 3, ranks=3) == [True] * 3
