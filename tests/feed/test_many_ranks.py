"""A snapshot of several ranks, however its tensors were spread, is followed into whole tensors."""

import torch

from tests.feed.versions import NotedFaults, follower, update
from tests.integrations.exporting.states import MESHES, RANKS, SPREADINGS, as_torch, small_blocks
from tests.session.group.states import Spreading, captured
from tests.session.group.stores import Hosts


def test_each_version_is_put_together_and_equal_blocks_are_not_read() -> None:
    backend, faults = small_blocks(), NotedFaults()
    hosts = Hosts(backend, RANKS)
    spreadings = {name: Spreading(each.whole.copy(), each.spread) for name, each in SPREADINGS.items()}
    mine = {name: torch.zeros(each.whole.shape, dtype=torch.int32) for name, each in spreadings.items()}
    turned = {name: torch.zeros_like(tensor).t().contiguous().t() if tensor.ndim == 2 else tensor.clone() for name, tensor in mine.items()}
    feed, other = follower(backend, faults).follow("job", into=mine), follower(backend).follow("job", into=turned)
    read = []
    for step in range(4):
        hosts.put(lambda rank: as_torch(captured(spreadings, MESHES, rank, RANKS, ["text", 7])), step=step)
        faults.read_bytes = 0
        update(feed)
        update(other)
        read.append(faults.read_bytes)
        for name, each in spreadings.items():
            assert torch.equal(mine[name], torch.from_numpy(each.whole)), name
            assert torch.equal(turned[name], mine[name]), name
            if step < 2:
                each.whole.reshape(-1)[:: len(each.whole) + 7 - step] += 1
        if step == 2:
            next(iter(spreadings.values())).whole.reshape(-1)[0] += 1
    assert read[3] < read[2] / 2
    before = faults.read_bytes
    again = {name: tensor.clone() for name, tensor in mine.items()}  # blocks are put together from the tensors to be compared
    update(follower(backend, faults).follow("job", into=again))
    assert faults.read_bytes - before < read[0] / 3
    assert all(torch.equal(again[name], tensor) for name, tensor in mine.items())
