"""What many ranks wrote with torch.distributed.checkpoint: pieces stay pieces, and are the blocks of the ranks' own save."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import tensorstore_ck as tsck
from tensorstore_ck.integrations.importing import import_checkpoint
from tests.integrations.importing.same import require_same
from tests.session.group.pool import GROUPS, RANKS, TIMEOUT_SECONDS, Pool, make_store, opened
from tests.session.group.test_parallel_models import side_of, training

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def save_and_put(folder: str, kind: str) -> int:
    """What the save added."""
    state = {**side_of(*training(kind, 1)), "step": 3}
    dcp_save(state, storage_writer=FileSystemWriter(f"{folder}/{kind}", thread_count=2))
    put = opened(folder, RANKS).put_snapshot(state, ref=kind.replace(" ", "-"), group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS)
    return put.new_bytes


@pytest.mark.parametrize("kind", ["fsdp2 over tp", "fsdp1"])
def test_sharded_states(pool: Pool, folder: Path, kind: str) -> None:
    pool.run(save_and_put, str(folder), kind)
    dcp_to_torch_save(folder / kind, folder / "consolidated.pt")
    expected: Any = torch.load(folder / "consolidated.pt", weights_only=False)
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        imported = import_checkpoint(store, folder / kind, ref=f"old/{kind.replace(' ', '-')}")
        found = store.checkout(imported.snapshot.root)
        assert imported.contents.tensors == 4 * (1 + 3)
    require_same(found, expected)
    assert found["model"]["0.weight"].shape == (48, 24)


def save_large(folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {
        "rows": distribute_tensor(torch.randn(801, 64), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(64, 801), mesh, [Shard(1)]),
    }
    dcp_save(state, storage_writer=FileSystemWriter(f"{folder}/large"))
    opened(folder, RANKS).put_snapshot(state, ref="large", group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS)


def test_the_same_blocks_as_the_ranks_saved(pool: Pool, folder: Path) -> None:
    pool.run(save_large, str(folder))
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        imported = import_checkpoint(store, folder / "large", ref="large", expect=tsck.ANY).snapshot
        require_same(store.checkout("large"), store.checkout("large~1"))
        with store.open_snapshot("large") as lazy:
            torch.manual_seed(1)
            assert torch.equal(lazy["rows"][99:305], torch.randn(801, 64)[99:305])
        assert store.fsck(read_data=True).ok
    assert imported.logical_bytes > 400_000
    assert imported.new_bytes < 20_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    make_store(folder)
    return folder
