"""Wrapper subclasses through DCP: `Writer` refuses them by name, `Reader` gives their inner tensors, and neither crashes."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Reader, Writer


def moment(value: float = 0.0) -> Any:
    logging.disable(logging.WARNING)
    from torchao.optim.subclass_8bit import OptimState8bit

    logging.disable(logging.NOTSET)
    made = OptimState8bit.zeros((16, 256))
    made.codes.fill_(int(value))
    made.scale.fill_(value)
    return made


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_writer_refuses_what_it_cannot_store_by_name(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True) as store:
        with pytest.raises((CheckpointException, tsck.UnsupportedValueError), match=r"optimizer\.m.*OptimState8bit"):
            dcp.save({"optimizer": {"m": moment()}}, storage_writer=Writer(store, "main"), no_dist=True)
        assert not store.branches()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_reader_gives_inner_tensors_by_their_own_names(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True) as store:
        store.put_snapshot({"m": moment(3.0), "w": torch.ones(4)}, ref="main")
        state: dict[str, Any] = {"m": {"codes": torch.zeros(16, 256, dtype=torch.uint8), "scale": torch.zeros(16)}, "w": torch.zeros(4)}
        dcp.load(state, storage_reader=Reader(store, "main"), no_dist=True)
        assert state["m"]["codes"].float().mean() == state["m"]["scale"].mean() == 3
        assert bool((state["w"] == 1).all())
