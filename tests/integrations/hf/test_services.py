"""What a Trainer does with others: a search of hyperparameters, and pushes to the Hub, whose uploads alone are replaced."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import huggingface_hub
import optuna
import pytest
import transformers.trainer
from transformers import GPT2LMHeadModel

import tensorstore_ck as tsck
from tensorstore_ck.integrations import hf
from tests.integrations.hf import runs

pytestmark = pytest.mark.slow


class Upload(NamedTuple):
    path: str | None
    message: str
    files: frozenset[str]


@pytest.fixture
def uploads() -> Iterator[list[Upload]]:
    made: list[Upload] = []

    def upload_folder(_api: object, *, folder_path: str, commit_message: str, path_in_repo: str | None = None, **_: object) -> Future[None]:
        files = frozenset(each.name for each in Path(folder_path).iterdir() if each.is_file())
        made.append(Upload(path_in_repo, commit_message, files))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def create_repo(_api: object, repo_id: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    with ExitStack() as replaced:
        for each in (create_repo, upload_folder):
            replaced.enter_context(patch.object(huggingface_hub.HfApi, each.__name__, each))
            if hasattr(transformers.trainer, each.__name__):  # older versions import the methods of a HfApi
                replaced.enter_context(patch.object(transformers.trainer, each.__name__, partial(each, None)))
        yield made


def test_a_search_has_a_branch_for_each_trial(tmp_path: Path, store: tsck.Store) -> None:
    given = runs.parts(tmp_path / "out", max_steps=8, eval_strategy="steps", eval_steps=8)
    config = given.pop("model").config
    trainer = hf.Trainer(**given, model_init=lambda: GPT2LMHeadModel(config), store=store, ref=runs.REF)
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True)},
        n_trials=2,
        direction="minimize",
        sampler=optuna.samplers.RandomSampler(seed=1),
    )
    assert store.branches().keys() == {f"{runs.REF}/run-0", f"{runs.REF}/run-1"}
    objectives = {}
    for number in ("0", "1"):
        assert [each.step for each in store.log(f"{runs.REF}/run-{number}")] == [8, 4]
        pointer = json.loads((tmp_path / "out" / f"run-{number}" / "checkpoint-8" / "snapshot.json").read_text())
        newest = store.resolve(f"{runs.REF}/run-{number}")
        assert pointer["address"] == newest.root
        objectives[number] = store.show(newest.root).snapshot.metrics["eval_loss"]
    assert best.run_id == min(objectives, key=objectives.__getitem__)


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "end"])
def test_pushes_have_the_model(tmp_path: Path, store: tsck.Store, uploads: list[Upload], strategy: str) -> None:
    options: dict[str, Any] = {"push_to_hub": True, "hub_strategy": strategy, "hub_always_push": True, "hub_token": "none"}
    trainer = runs.over_store(tmp_path / "out", store, max_steps=8, **options)
    trainer.train()
    models = [each for each in uploads if each.path is None]
    pointers = [each for each in uploads if each.path == "last-checkpoint"]
    assert [each.message for each in models] == ([] if strategy == "end" else [f"Training in progress, step {step}" for step in (4, 8)])
    assert all({"model.safetensors", "config.json"} <= each.files for each in models)
    assert len(pointers) == (2 if strategy == "checkpoint" else 0)
    assert all({"model.safetensors", "trainer_state.json", "snapshot.json"} <= each.files for each in pointers)
    runs.assert_equal(runs.weights(trainer), GPT2LMHeadModel.from_pretrained(tmp_path / "out" / "checkpoint-8").state_dict())
