"""A snapshot in addition to a DCP checkpoint: compared bit for bit, and the checkpoint is there whatever happens to the snapshot."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.futures import Future

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import ShadowReport, ShadowWarning, ShadowWriter, Writer
from tests.integrations.dcp.dcp_states import difference
from tests.session.group.pool import GROUPS, Pool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def make_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(700, 2000, generator=generator)
    return {"model": {"w": weight, "b": torch.arange(3.0), "e": torch.empty(0, 4)}, "step": 7, "rng": random.Random(1).getstate()}


def save(path: Path, theirs: FileSystemWriter, store: str = "store") -> ShadowReport:
    writer = ShadowWriter(theirs, Writer(path / store, "r", step=7, cache_dir=path / "cache", codec="raw"))
    dcp.save(make_state(), storage_writer=writer, no_dist=True)
    assert writer.report is not None
    return writer.report


def checkpoint(path: Path) -> dict[str, Any]:
    state = {"model": {"w": torch.zeros(700, 2000), "b": torch.zeros(3), "e": torch.empty(0, 4)}, "step": 0, "rng": ()}
    dcp.load(state, storage_reader=FileSystemReader(path / "dcp"), no_dist=True)
    return state


def test_both_are_written_and_equal(tmp_path: Path) -> None:
    report = save(tmp_path, FileSystemWriter(tmp_path / "dcp"))
    assert (report.differing, report.problem, report.compared_items) == ((), "", 5)
    assert report.checkpoint_bytes > 5_600_000
    assert report.snapshot_bytes > 5_600_000
    assert difference(make_state(), checkpoint(tmp_path)) is None
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
        assert report.snapshot is not None
        assert store.resolve("r@7").root == report.snapshot.root
        assert difference(make_state(), store.checkout("r")) is None


class Corrupting(FileSystemWriter):
    """Flips a bit of what is on the disk already."""

    pattern = make_state()["model"]["w"][300].numpy().tobytes()[:64]

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        done = super().write_data(plan, planner)
        done.wait()
        (file,) = Path(self.path).glob("*.distcp")
        data = bytearray(file.read_bytes())
        data[data.index(self.pattern) + 5] ^= 1
        file.write_bytes(data)
        return done


class CorruptingTiny(Corrupting):
    pattern = torch.arange(3.0).numpy().tobytes()


@pytest.mark.parametrize(("kind", "name"), [(Corrupting, "model.w"), (CorruptingTiny, "model.b")])
def test_a_difference_is_found_and_nothing_published(tmp_path: Path, kind: type[Corrupting], name: str) -> None:
    with pytest.warns(ShadowWarning, match=name):
        report = save(tmp_path, kind(tmp_path / "dcp"))
    assert report.differing == (name,)
    assert report.snapshot is None
    assert (tmp_path / "dcp" / ".metadata").exists()
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
        assert store.branches() == {}


def test_a_store_that_fails_costs_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(ShadowWarning, match="file"):
        report = save(tmp_path, FileSystemWriter(tmp_path / "dcp"), "file/store")
    assert report.snapshot is None
    assert report.problem
    assert difference(make_state(), checkpoint(tmp_path)) is None


def test_a_save_that_conflicts_costs_no_checkpoint(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot({"a": 1}, ref="r")
        other = tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache")
        writer = ShadowWriter(FileSystemWriter(tmp_path / "dcp"), Writer(other, "r"))
        with pytest.warns(ShadowWarning, match="ConflictError"):
            dcp.save(make_state(), storage_writer=writer, no_dist=True)
        other.close()
    assert difference(make_state(), checkpoint(tmp_path)) is None


def save_on_ranks(folder: str) -> tuple[str, tuple[str, ...], int] | None:
    writer = ShadowWriter(FileSystemWriter(f"{folder}/dcp"), Writer(f"{folder}/store", "r", cache_dir=f"{folder}/cache"))
    dcp.save(make_state(), storage_writer=writer, process_group=GROUPS[4])
    return None if writer.report is None else (writer.report.problem, writer.report.differing, writer.report.compared_items)


def test_every_rank_compares_what_it_wrote(pool: Pool, tmp_path: Path) -> None:
    first, *others = pool.run(save_on_ranks, str(tmp_path), ranks=4)
    assert first == ("", (), 5)
    assert others == [None] * 3
    assert difference(make_state(), checkpoint(tmp_path)) is None
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
        assert difference(make_state(), store.checkout("r")) is None
        assert store.fsck(read_data=True).ok
