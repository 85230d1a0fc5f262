"""The job: trains a small GPT and saves snapshots, so that a `kill -9` costs only the steps since the last one.

    python -m examples.demo.train ./ckpt --ref runs/gpt

Start it again after it died: it resumes from the ref, and ends bit-identical to a run that was never stopped. All that this takes is in
`Job.state`, `Job.load` and `train`.
"""

import argparse
import math
import platform
import random
from dataclasses import asdict, dataclass
from typing import Any

import torch

import tensorstore_ck as tsck
from examples.demo.compare import fingerprint
from examples.demo.data import ShufflingLoader, read_corpus
from examples.demo.model import GPT


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that the result depends on."""

    steps: int
    snapshot_every: int
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    accumulate: int = 2
    corpus_bytes: int = 200_000
    dropout: float = 0.1
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    seed: int = 1337


SIZES = {
    "demo": Config(steps=200, snapshot_every=10, layers=3, width=128, heads=4, context=64, batch=8),
    "tiny": Config(steps=12, snapshot_every=2, layers=2, width=32, heads=2, context=32, batch=4, corpus_bytes=3_000, warmup_steps=2),
}


class Job:
    """A training run: model, optimizer, schedule, data, random numbers and progress."""

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(1)  # the order in which threads add changes the last bits
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(config.seed)
        random.seed(config.seed)
        self.config = config
        self.step = 0
        self.losses: list[float] = []
        self.model = GPT(layers=config.layers, width=config.width, heads=config.heads, context=config.context, dropout=config.dropout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._learning_rate_factor)
        self.loader = ShufflingLoader(read_corpus(config.corpus_bytes), batch=config.batch, context=config.context, seed=config.seed)

    def _learning_rate_factor(self, step: int) -> float:
        warmup, steps = self.config.warmup_steps, self.config.steps
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    def state(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, without copies."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "loader": self.loader.state_dict(),
            "rng": {"python": random.getstate(), "torch": torch.get_rng_state()},
            "step": self.step,
            "losses": self.losses,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restores a state that `state` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.loader.load_state_dict(state["loader"])
        random.setstate(state["rng"]["python"])
        torch.set_rng_state(state["rng"]["torch"])
        self.step = state["step"]
        self.losses = state["losses"]

    def advance(self) -> float:
        """Runs one optimizer step, over several batches, and returns its loss."""
        self.optimizer.zero_grad()
        total = 0.0
        for _ in range(self.config.accumulate):
            loss = self.model.loss(*self.loader.next_batch()) / self.config.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.losses.append(total)
        return total


def train(store: tsck.Store, ref: str, config: Config) -> None:
    """Trains to the end, from the newest snapshot on `ref` if there is one."""
    job = Job(config)
    if ref in store.branches():
        job.load(store.checkout(ref))
        say("resumed", job.step)
    while job.step < config.steps:
        rate = job.schedule.get_last_lr()[0]
        loss = job.advance()
        say("step", job.step, loss.hex())
        if job.step % config.snapshot_every == 0 or job.step == config.steps:
            say("putting", job.step)
            snapshot = store.put_snapshot(
                job.state(),
                ref=ref,
                step=job.step,
                metrics={"loss": loss},
                metadata={"learning_rate": rate, "config": asdict(config), "torch": torch.__version__, "python": platform.python_version()},
            )
            say("saved", job.step, snapshot.root)
    say("done", job.step, fingerprint(job.state()))


def say(*words: object) -> None:
    """Prints one line per event, for a person or the supervisor."""
    print(*words, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo.train", description="Train a small GPT, with snapshots.")
    parser.add_argument("store", help="path or URL of the store; created if missing")
    parser.add_argument("--ref", default="runs/gpt", help="the branch to resume or create (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="demo", help="size of the model and length of the training (default: %(default)s)")
    arguments = parser.parse_args()
    with tsck.open(arguments.store, create=True) as store:
        train(store, arguments.ref, SIZES[arguments.size])


if __name__ == "__main__":
    main()
