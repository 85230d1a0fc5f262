"""Every way to a snapshot of a ref that the user's trust file names asks for its signature."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import load as dcp_load

import tensorstore_ck as tsck
from tensorstore_ck.common.signing_keys import SigningKey
from tensorstore_ck.errors import UntrustedError
from tensorstore_ck.integrations.dcp import Reader
from tensorstore_ck.integrations.filesystem import SnapshotFileSystem


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(4)}


def resume(store: tsck.Store, folder: Path) -> None:
    tsck.TrainingState(model=torch.nn.Linear(2, 2)).restore(store, "r")


def follow(store: tsck.Store, folder: Path) -> None:
    with store.follow("r", into=state()) as feed:
        feed.poll()


DOORS: dict[str, Callable[[tsck.Store, Path], object]] = {
    "checkout": lambda store, _: store.checkout("r"),
    "a step": lambda store, _: store.checkout("r@1"),
    "the best": lambda store, _: store.checkout("r^best:loss"),
    "the head, as a resume names it": lambda store, _: store.checkout("r~0"),
    "a tag": lambda store, _: store.checkout("tagged"),
    "resolve": lambda store, _: store.resolve("r"),
    "lazily": lambda store, _: store.open_snapshot("r"),
    "a rank's state": lambda store, _: store.rank_state("r", 0),
    "statistics": lambda store, _: store.statistics("r"),
    "metadata": lambda store, _: store.metadata("r"),
    "a resume": resume,
    "an export": lambda store, folder: tsck.export_snapshot(store, "r", folder / "out", format="safetensors"),
    "inference": follow,
}


@pytest.mark.parametrize("door", DOORS)
def test_an_unsigned_snapshot_is_refused(tmp_path: Path, door: str) -> None:
    trust = tmp_path / "trust.toml"
    trust.write_text(f'[[trust]]\nrefs = ["r", "tagged"]\nkeys = ["{SigningKey.generate().public}"]\n')
    with tsck.open(tmp_path / "ck", create=True, no_sync=True) as store:
        store.put_snapshot(state(), ref="r", step=1, metrics={"loss": 1.0})
        store.tag("tagged", "r")
    with tsck.open(tmp_path / "ck", trust=trust) as store:
        with pytest.raises(UntrustedError, match="is not trusted"):
            DOORS[door](store, tmp_path)
        assert not (tmp_path / "out").exists()
        assert len(store.log("r")) == 1, "what there is can be listed"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_other_programs_are_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "tensorstore_ck").mkdir()
    (tmp_path / "tensorstore_ck" / "trust.toml").write_text('[[trust]]\nrefs = ["r"]\nkeys = []\n')
    with tsck.open(tmp_path / "ck", create=True, no_sync=True) as store:
        store.put_snapshot(state(), ref="r", step=1)
        with pytest.raises(CheckpointException, match="is not trusted"):
            dcp_load(state(), storage_reader=Reader(store, "r"), no_dist=True)
    files = SnapshotFileSystem(store=str(tmp_path / "ck"), skip_instance_cache=True)
    assert files.ls("", detail=False) == ["r"]
    with pytest.raises(OSError, match="is not trusted"):
        files.ls("r")
