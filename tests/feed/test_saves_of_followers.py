"""A handle that follows a branch and saves what it follows, as a trainer of heads on a base that is published elsewhere."""

import random
from typing import Any

import pytest
import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tests.effort import effort
from tests.feed.versions import REF, copy_of, equal, first_state, follower, save, train, zeros
from tests.gc.stores import open_store


@pytest.mark.parametrize("seed", range(effort(4, 200)))
def test_a_save_has_what_a_swap_made_of_frozen_tensors(seed: int) -> None:
    generator, backend = random.Random(seed), MemoryBackend()
    trainer, store, state = open_store(backend), follower(backend), first_state()
    save(trainer, state, 0)
    versions = {0: copy_of(state)}
    mine: Any = zeros(state) | {"head": torch.zeros(5000)}
    feed = store.follow(REF, into=mine, select="model.*")
    saves = 0
    for step in range(1, 60):
        what = generator.choice(["publish", "poll", "swap", "other", "save", "save", "restore"])
        if what == "publish":
            train(state, step)
            save(trainer, state, step)
            versions[step] = copy_of(state)
        elif what == "poll":
            feed.poll()
        elif what == "other":
            feed.poll(f"{REF}@{generator.choice(list(versions))}")
        elif what == "swap":
            feed.swap()
        elif what == "restore" and saves:
            store.checkout("mine", into=mine)
        elif what == "save":
            frozen = generator.choice((["model.*"], ["model.layers.*"], []))
            mine["head"].fill_(step)
            stored = trainer.checkout(store.put_snapshot(mine, ref="mine", step=step, frozen=frozen, unchanged="ok").root)
            assert equal(stored, mine)
            assert torch.equal(stored["head"], mine["head"])
            saves += 1
    assert saves > 5
