"""NeMo Automodel's checkpointer over a store, on ranks of FSDP2: ``automodel_job FOLDER``.

It trains a model of transformers a step, saves it, loads it into a new one, trains both a step more, and says what came of it.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nemo_automodel.components.checkpoint.config import CheckpointingConfig
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from examples import nemo_automodel
from tests.integrations.rank_runs import say

VOCABULARY = 32


class Job:
    """A model and its optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, tie_word_embeddings=False, **shape)
        self.model = LlamaForCausalLM(config)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, step: int) -> None:
        tokens = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(step))
        self.model(tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        """This rank's shards of all that it has."""
        state: Any = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        held = [*self.model.state_dict().values(), *(each for values in state.values() for each in values.values())]
        return [each.to_local().clone() if isinstance(each, DTensor) else torch.as_tensor(each).clone() for each in held]


def same(one: Job, other: Job) -> bool:
    pairs = list(zip(one.values(), other.values(), strict=True))
    return all(torch.equal(left, right) for left, right in pairs)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    nemo_automodel.STORE = str(folder / "store")
    config = CheckpointingConfig(
        checkpoint_dir=folder / "out", model_save_format="torch_save", save_consolidated=False, model_repo_id="tiny", model_cache_dir=folder
    )
    ranks = {"dp_rank": dist.get_rank(), "tp_rank": 0, "pp_rank": 0}
    checkpointer = nemo_automodel.StoreCheckpointer(config, **ranks)
    job, path = Job(1), str(folder / "out" / "epoch_0_step_1")
    job.train(1)
    checkpointer.save_model(job.model, path)
    checkpointer.save_optimizer(job.optimizer, job.model, path)
    checkpointer.save_model(job.model, str(folder / "out" / "epoch_0_step_2"))  # a run that was killed before it saved the optimizer, too
    new, checkpointer = Job(2), nemo_automodel.StoreCheckpointer(config, **ranks)
    differed = not same_weights(job, new)
    checkpointer.load_model(new.model, f"{path}/model")
    checkpointer.load_optimizer(new.optimizer, new.model, path)
    is_loaded = same(job, new)
    for each in (job, new):
        each.train(2)
    is_same = same(job, new)
    for step in (2, 3):
        checkpointer.save_model(new.model, str(folder / "out" / f"epoch_0_step_{step}"))
        checkpointer.save_optimizer(new.optimizer, new.model, str(folder / "out" / f"epoch_0_step_{step}"))
        new.train(step + 1)
    files = sorted(each.name for each in (folder / "out").rglob("*") if each.is_file())
    say(differed=differed, is_loaded=is_loaded, is_same=is_same, files=files)
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


def same_weights(one: Job, other: Job) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(left.to_local(), right.to_local()) for left, right in pairs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
