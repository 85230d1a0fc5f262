"""What is no store, no ref and no policy is refused when an adapter is made, not at the first save."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import transformers

import tensorstore_ck as tsck
from tensorstore_ck import InvalidNameError, InvalidOptionError, InvalidUrlError
from tests.long_errors import long_errors_of_adapter

pytestmark = pytest.mark.slow

Adapter = Callable[[Path, Any, Any], object]


def _trainer(folder: Path, store: Any, ref: Any) -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0)
    options = transformers.TrainingArguments(output_dir=str(folder / "out"), report_to=[], use_cpu=True)
    trainer = transformers.Trainer(model=transformers.GPT2LMHeadModel(config), args=options)
    try:
        tsck.hf.attach(trainer, store=store, ref=ref)
    finally:
        assert type(trainer) is transformers.Trainer  # as it was, so that a second call can be right


def _accelerator(folder: Path, store: Any, ref: Any) -> None:
    tsck.accelerate.attach(accelerate.Accelerator(cpu=True), store=store, ref=ref)


def _manager(folder: Path, store: Any, ref: Any) -> object:
    return tsck.CheckpointManager(store=store, ref=ref)


def _callback(folder: Path, store: Any, ref: Any) -> object:
    return tsck.lightning.SnapshotCheckpoint(store, ref)


@pytest.mark.parametrize("adapter", [_trainer, _accelerator, _manager])
@pytest.mark.parametrize("store", [5, None, b"store"])
def test_what_is_no_store(tmp_path: Path, adapter: Adapter, store: object) -> None:
    with pytest.raises(InvalidUrlError, match=f"a {type(store).__name__} is not the URL of a store: give a folder"):
        adapter(tmp_path, store, "runs/x")


@pytest.mark.parametrize("adapter", [_trainer, _accelerator, _manager, _callback])
@pytest.mark.parametrize("ref", [5, "a b", "runs/x@1"])
def test_what_is_no_ref(tmp_path: Path, adapter: Adapter, ref: object) -> None:
    with pytest.raises(InvalidNameError, match="cannot be the name of a branch or tag"):
        adapter(tmp_path, tmp_path / "store", ref)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("keep", [5, "last", {1: 2}])
def test_what_is_no_policy(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(InvalidOptionError, match="a policy is a dict of rules, such as"):
        tsck.CheckpointManager(store=tmp_path / "store", ref="runs/x", keep=keep)
    with pytest.raises(InvalidOptionError, match="a policy is a dict of rules, such as"):
        tsck.lightning.SnapshotCheckpoint(tmp_path / "store", "runs/x", keep=keep)


def test_what_is_no_trainer(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"attach a transformers.Trainer, not 5"):
        tsck.hf.attach(5, store=tmp_path, ref="runs/x")
    with pytest.raises(InvalidOptionError, match=r"attach an accelerate.Accelerator, not 5"):
        tsck.accelerate.attach(5, store=tmp_path, ref="runs/x")


@pytest.mark.parametrize("name", ["accelerate", "dcp", "hf", "lightning", "mlflow", "wandb"])
def test_errors_of_what_an_adapter_offers_are_short(name: str) -> None:
    """Those of the others: in their folders, for `make test-apart`."""
    assert long_errors_of_adapter(name) == []
