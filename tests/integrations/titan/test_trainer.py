"""`SnapshotManager` in torchtitan's Trainer: a run that is cut and resumed does what an undisturbed one does, bit for bit."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan cannot be installed with the pinned fsspec: run `make test-apart`")

import torch
from safetensors.torch import load_file

import tensorstore_ck as tsck
from tests.integrations.conftest import has_finished
from tests.integrations.titan import runs

pytestmark = [pytest.mark.slow, *map(pytest.mark.filterwarnings, runs.WARNINGS)]


class Cut(Exception):
    """In place of a kill."""


def cut_at(step: int) -> Any:
    def cut(now: int) -> None:
        if now == step:
            raise Cut

    return cut


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """Without a store."""
    folder = tmp_path_factory.mktemp("native")
    return runs.train(runs.make_config(folder, runs.native(enable=False)))


@pytest.mark.parametrize(("async_mode", "after", "done"), [("disabled", 7, 6), ("async", 4, 3), ("async_with_pinned_mem", 9, 9)])
def test_a_cut_run_is_resumed_exactly(tmp_path: Path, undisturbed: runs.Run, async_mode: str, after: int, done: int) -> None:
    config = runs.make_config(tmp_path, runs.snapshots(tmp_path, async_mode=async_mode, last_save_model_only=False))
    with pytest.raises(Cut):
        runs.train(config, cut_at(after))
    runs.assert_continues(runs.train(config), undisturbed, done)
    ended = runs.train(config)  # there is nothing left to train
    assert (ended.batches, ended.losses) == ([], [])
    assert all(torch.equal(tensor, undisturbed.weights[name]) for name, tensor in ended.weights.items())


def test_the_last_save_in_the_format_of_hugging_face(tmp_path: Path, undisturbed: runs.Run) -> None:
    config = runs.make_config(tmp_path, runs.snapshots(tmp_path, last_save_in_hf=True, export_dtype="bfloat16"))
    runs.train(config)
    found = {
        name: tensor for path in (tmp_path / "out/checkpoint/step-10").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    embeddings = undisturbed.weights["tok_embeddings.weight"].bfloat16()
    assert torch.equal(found["model.embed_tokens.weight"], embeddings)
    assert "model.layers.0.self_attn.q_proj.weight" in found
    with tsck.open(tmp_path / "store") as store, store.open_snapshot(runs.REF) as last:
        assert torch.equal(last["model.tok_embeddings.weight"][:], embeddings)


def test_a_run_of_torchtitans_own_goes_on_in_a_store(tmp_path: Path, undisturbed: runs.Run) -> None:
    with pytest.raises(Cut):
        runs.train(runs.make_config(tmp_path, runs.native()), cut_at(7))
    resumed = runs.train(runs.make_config(tmp_path, runs.snapshots(tmp_path)))
    assert [step for step, _, _ in resumed.losses] == [7, 8, 9, 10]
    with tsck.open(tmp_path / "store") as store:
        assert [snapshot.step for snapshot in store.log(runs.REF)] == [10, 9]
        assert has_finished(store)


def test_the_command_line() -> None:
    """torchtitan's options, and those of the store; those that are not given come from the example."""
    from torchtitan.config import ConfigManager

    arguments = [
        "--module",
        "examples.torchtitan_llama",
        "--config",
        "debugmodel",
        "--checkpoint.ref",
        "runs/b",
        "--checkpoint.interval",
        "7",
    ]
    found = ConfigManager().parse_args([*arguments, "--checkpoint.async_mode", "async"]).checkpoint
    assert isinstance(found, tsck.titan.SnapshotManager.Config)
    assert (found.enable, found.store, found.ref, found.interval, found.keep_latest_k) == (True, "./ckpt", "runs/b", 7, 3)
