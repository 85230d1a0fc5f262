"""`run_script`: a script as it is saves to a store. A few lines stand for Megatron-LM; .ci/run_megatron_lm.py runs the real one."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")

import torch

import tensorstore_ck as tsck
from tests.end_to_end.scripts.launch import free_port, launched
from tests.integrations.conftest import has_finished

pytestmark = pytest.mark.slow
OPTIONS = """
from types import SimpleNamespace

def get_args():
    return SimpleNamespace(ckpt_fully_parallel_save=True)
"""
TRAINING = """
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor

def save_checkpoint(iteration, model, optimizer, opt_param_scheduler, operations, checkpointing_context=None):
    dist_checkpointing.save(model, f"iter_{iteration:07d}", checkpointing_context["save_strategy"])

def pretrain(steps):
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    context = {}
    weights = torch.arange(4.0)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for step in range(1, steps + 1):
        torch.os.mkdir(f"iter_{step:07d}")
        weights += 1
        model = {"weights": ShardedTensor.from_rank_offsets("weights", weights), "iteration": step}
        save_checkpoint(step, model, optimizer, None, 0, checkpointing_context=context)
"""
SCRIPT = """
import argparse
from megatron.training import training

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--stop", action="store_true")
given = parser.parse_args()
training.pretrain(given.train_iters)
if given.stop:
    raise SystemExit
"""
RUN = "import sys, tests.integrations.megatron.on_cpu; from tensorstore_ck.integrations.megatron.run_script import main; main(sys.argv[1:])"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_script_saves_to_a_store(tmp_path: Path, is_stopped: bool) -> None:
    """A script that stops before its end, as at a limit of time, does not end the run."""
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(OPTIONS)
    (package / "training.py").write_text(TRAINING)
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = ["--store", str(tmp_path / "store"), "--ref", "runs/gpt", "pretrain_gpt.py", "--train-iters", "2"]
    with launched(["-c", RUN, *flags, *(["--stop"] if is_stopped else [])], tmp_path, **rank) as program:
        code, _ = program.end()
        assert code == 0, program.errors()
    assert (tmp_path / "iter_0000002" / "snapshot.json").exists()
    with tsck.open(tmp_path / "store") as store:
        assert has_finished(store) != is_stopped
        head = store.resolve("runs/gpt")
        assert (head.step, store.checkout("runs/gpt", select=["weights"])["weights"].tolist()) == (2, (torch.arange(4.0) + 2).tolist())
