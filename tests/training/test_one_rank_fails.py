"""What fails on one rank alone before a save fails the save on all, and the ranks go on together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.session.group.channel import Channel, ChannelError
from tensorstore_ck.session.group.round import Round
from tensorstore_ck.training import TrainingState
from tests.effort import PATIENCE_SECONDS
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, make_store

pytestmark = [pytest.mark.slow, pytest.mark.race]
Told = list[str]


class Loader:
    """Cannot say where it is while `is_bad`."""

    def __init__(self) -> None:
        self.is_bad = False

    def state_dict(self) -> dict[str, int]:
        if self.is_bad:
            raise ValueError("the loader's server does not answer")
        return {"position": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


def put_all(folder: str, how: str, before: Callable[[int, Loader], object]) -> tuple[Told, list[int | None]]:
    """What came of each of some saves, and what is stored."""
    rank, loader = dist.get_rank(), Loader()
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    training = TrainingState(model=model, dataloader=loader)
    staging = f"{folder}/disk-{rank}" if how == "staged" else None
    told = []
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}", staging=staging) as store:
        options: dict[str, Any] = {"ref": "job", "group": GROUPS[2], "timeout_seconds": TIMEOUT_SECONDS, "unchanged": "ok"}
        for step in range(4):
            before(step, loader)
            try:
                if how == "put":
                    training.put(store, step=step, **options)
                else:
                    training.put_async(store, step=step, **options).wait(PATIENCE_SECONDS)
            except tsck.StoreError as exc:
                told.append(f"{step}: {exc}")
            dist.barrier(GROUPS[2])
        return told, [each.step for each in reversed(store.log("job"))]


def fail_to_capture(folder: str, how: str) -> tuple[Told, list[int | None]]:
    def before(step: int, loader: Loader) -> None:
        loader.is_bad = step == 1 and dist.get_rank() == 1

    return put_all(folder, how, before)


@pytest.mark.parametrize("how", ["put", "put_async", "staged"])
def test_a_part_that_cannot_be_captured(pool: Pool, tmp_path: Path, how: str) -> None:
    make_store(tmp_path)
    for told, steps in pool.run(fail_to_capture, str(tmp_path), how, ranks=2):
        (message,) = told
        assert message.startswith("1: ")
        assert "rank 1" in message
        assert "the loader's server does not answer" in message
        assert steps == [0, 2, 3]


def lose_the_connection(folder: str, how: str, title: str) -> tuple[Told, list[int | None], bool]:
    """Rank 1 does its work in the first attempt of that title, and does not learn the outcome."""
    real_put, real_call = Round._put, Channel._call
    lost: list[Channel] = []
    calls = [1, 1]  # to wait for the outcome, and to tell one

    def put(self: Round, key: str, record: Any) -> None:
        real_put(self, key, record)
        if dist.get_rank() == 1 and not lost and key.startswith("result") and title in self._title:
            self._grace = 0.1
            lost.append(self._channel)

    def call(self: Channel, *args: Any) -> Any:
        if self in lost and calls:
            calls.pop()
            raise ChannelError("the connection is lost")
        return real_call(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Round, "_put", put)
        patch.setattr(Channel, "_call", call)
        return *put_all(folder, how, lambda step, loader: None), bool(lost)


@pytest.mark.parametrize(
    ("how", "title"), [("put", "a TrainingState hold"), ("put_async", "a TrainingState hold"), ("put_async", "the ranks of each host")]
)
def test_an_agreement_of_which_one_rank_does_not_learn(pool: Pool, tmp_path: Path, how: str, title: str) -> None:
    make_store(tmp_path)
    answers = pool.run(lose_the_connection, str(tmp_path), how, title, ranks=2)
    assert [lost for _, _, lost in answers] == [False, True]
    for told, steps, _ in answers:
        (message,) = told
        assert message.startswith("0: ")
        assert "the connection is lost" in message
        assert steps == [1, 2, 3]
