"""A job under torchrun whose every step depends on all that a snapshot must hold: FSDP2 x TP on gloo, with dropout and a shuffling loader.

    torchrun --standalone --max-restarts 20 --nproc-per-node 4 -m tests.end_to_end.scripts.job FOLDER STEPS

Each start goes on from the newest snapshot in FOLDER. It says what it does in lines, each of one write, which no kill tears.
On the CPU DTensor keeps no generators of its own: what a rank drops out it draws from its process's, so each is seeded apart.
"""

import os
import random
import sys
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":  # before imports that take seconds: the test may kill this process during them
    os.write(1, f"{os.environ['RANK']} pid {os.getpid()}\n".encode())

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import tensorstore_ck as tsck
from examples.demo.compare import fingerprint
from tensorstore_ck.training import TrainingState

EVERY: Final = 3
REF: Final = "runs/job"
TP: Final = 2
WIDTH: Final = 32
HEADS: Final = 4
WORDS: Final = 64
SAMPLES: Final = 60
"""Not quite four batches, so that there are several epochs."""
BATCH: Final = 16


class Attention(nn.Module):
    """Its heads are spread over the ranks of TP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Of a transformer. Between its parts the sequence is spread over the ranks of TP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return x + self.dropout(self.mlp(self.norms[1](x)))  # type: ignore[no-any-return]


def build_model(mesh: DeviceMesh) -> nn.Module:
    """All its parameters are DTensors on both dims of the mesh."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
    sequence = SequenceParallel(use_local_output=True)
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    plan: dict[str, Any] = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "3": sequence,
        "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for block in "12":
        plan |= {f"{block}.{name}": sequence for name in ("norms.0", "norms.1", "dropout")}
        plan |= {f"{block}.{name}": gathered for name in ("attention", "mlp")}
        plan |= {f"{block}.{name}": ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.0")}
        plan |= {f"{block}.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.2")}
    parallelize_module(model, mesh["tp"], plan)
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


class Job:
    """Model, optimizer, schedule, data, random numbers, and how far it is."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._dp = mesh["dp"]
        dp_rank = self._dp.get_local_rank()
        torch.manual_seed(1)  # the same weights and samples on all ranks
        self.model = build_model(mesh)
        words = torch.randint(WORDS, (SAMPLES, 1)) + torch.arange(17) * torch.randint(1, 4, (SAMPLES, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=1000)
        self.cursor = tsck.SampleCursor(SAMPLES, batch_size=BATCH, seed=1)
        # with a generator of its own, since each iteration draws a number
        self._loader = DataLoader(
            TensorDataset(words % WORDS), batch_sampler=self.cursor.batches(dp_rank, self._dp.size()), generator=torch.Generator()
        )
        self._batches = iter(self._loader)
        # ranks of TP work on the same batch, so they must spoil it alike; each drops out what it has of an activation
        self._noise = torch.Generator().manual_seed(dp_rank)
        random.seed(dp_rank)
        np.random.seed(dp_rank)
        torch.manual_seed(100 + dist.get_rank())
        self.extra: dict[str, Any] = {"step": 0, "losses": [], "noise": self._noise}
        self.training = TrainingState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, dataloader=self.cursor, extra=self.extra
        )

    def resume(self, store: tsck.Store, address: str, group: Any) -> tsck.Snapshot | None:
        found = self.training.restore(store, address, group=group)
        self._batches = iter(self._loader)
        return found

    def step(self) -> float:
        """Returns the loss, averaged over all ranks."""
        (words,) = next(self._batches)
        spoilt = torch.rand(words.shape, generator=self._noise) < 0.1 * random.random() + 0.1 * np.random.random()
        logits = self.model(torch.where(spoilt, 0, words)[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        epoch = self.cursor.epoch
        self.cursor.advance()
        if self.cursor.epoch > epoch:
            self._batches = iter(self._loader)
        mean = loss.detach() / self._dp.size()
        dist.all_reduce(mean, group=self._dp.get_group())
        self.extra["step"] += 1
        self.extra["losses"].append(mean.item())
        return mean.item()


def gathered(value: Any) -> Any:
    """The same with tensors in full, of a state that ranks hold shares of. All of them must come."""
    if isinstance(value, dict):
        return {name: gathered(item) for name, item in value.items()}
    if isinstance(value, list):
        return [gathered(item) for item in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def captured(job: Job) -> dict[str, Any]:
    """What all ranks share, in full."""
    state = job.training.captured()
    return {name: gathered(state[name]) for name in ("model", "optimizer", "scheduler", "dataloader", "extra")}


def train(folder: Path, steps: int, group: Any, mesh: DeviceMesh) -> None:
    def say(*words: object) -> None:
        os.write(1, f"{' '.join(map(str, (dist.get_rank(), *words)))}\n".encode())

    job = Job(mesh)
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
        found = job.resume(store, REF, group)
        say("resumed", found.step if found else 0)
        while job.extra["step"] < steps:
            loss = job.step()
            number = job.extra["step"]
            say("step", number, loss.hex())
            if number % EVERY == 0:
                say("putting", number)
                snapshot = job.training.put(store, ref=REF, step=number, group=group)
                say("put", number, snapshot.root)
        own = {name: state for name, state in job.training.captured()["rank"].items() if name != "environment"}
        say("own", fingerprint({**own, "next": [random.random(), np.random.rand(), torch.rand(()), torch.rand((), generator=job._noise)]}))
        state = captured(job)
        if dist.get_rank() == 0:
            torch.save(state, folder / "end.pt")


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // TP, TP), mesh_dim_names=("dp", "tp"))
    train(Path(sys.argv[1]), int(sys.argv[2]), dist.group.WORLD, mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
