"""What each rank of the pool does in the tests of `Checkpointer`."""

import warnings
from typing import Any

import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.training.checkpointing import Trigger
from tensorstore_ck.training.checkpointing.triggers import DecidedTrigger
from tests.session.group.pool import GROUPS


class Asked(DecidedTrigger):
    """What a rank wants at a step, as a clock or a signal would."""

    def __init__(self, rank: int, step: int, *, any_rank: bool) -> None:
        super().__init__(any_rank=any_rank)
        self.now = 0
        self._rank, self._step = rank, step

    def wants(self) -> bool:
        return dist.get_rank() == self._rank and self.now >= self._step

    def saved(self, moment: Any) -> None:
        super().saved(moment)
        self._step = 1 << 40


def trigger(name: str) -> tuple[Trigger, list[Asked]]:
    match name:
        case "steps":
            return tsck.every_steps(4), []
        case "rank 0's clock":
            asked = Asked(0, 3, any_rank=True)
        case "a signal to rank 1":
            asked = Asked(1, 3, any_rank=True)
        case "rank 1's clock, which does not count":
            asked = Asked(1, 3, any_rank=False)
    return tsck.at_steps([11]) | asked, [asked]


def run(folder: str, name: str, ranks: int) -> tuple[list[int], list[str]]:
    """A job of 12 steps; at which it saved, and what was warned of."""
    rank, group = dist.get_rank(), GROUPS[ranks]
    when, told = trigger(name)
    state = {"w": torch.zeros(2000), "step": torch.zeros(1)}
    saved = []
    with (
        warnings.catch_warnings(record=True) as caught,
        tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}", codec="raw") as store,
        tsck.Checkpointer(store, state, ref="job", when=when, group=group, lead_steps=2, keep={"keep_last": 2}) as ckpt,
    ):
        warnings.simplefilter("always")
        assert ckpt.resume() is None
        for step in range(1, 13):
            for each in told:
                each.now = step
            dist.barrier(group)  # as a step's gradients do
            state["w"] += step
            state["step"].fill_(step)
            if ckpt.step(step) is not None:
                saved.append(step)
    return saved, [str(each.message) for each in caught]


def resume(folder: str, ranks: int) -> tuple[int | None, float, list[str]]:
    """The step, a sum over the state, and what was warned of."""
    rank = dist.get_rank()
    state = {"w": torch.full((2000,), -1.0), "step": torch.zeros(1)}
    with warnings.catch_warnings(record=True) as caught, tsck.open(f"{folder}/store", cache_dir=f"{folder}/again-{rank}") as store:
        warnings.simplefilter("always")
        with tsck.Checkpointer(store, state, ref="job", when=tsck.every_steps(4), group=GROUPS[ranks]) as ckpt:
            found = ckpt.resume()
    return None if found is None else found.step, float(state["w"].sum()), [str(each.message) for each in caught]
