"""A rank of a sharded engine follows its share of each tensor: nothing else is written, and of other blocks nothing is read."""

from pathlib import Path

import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.events import Event
from tests.feed.versions import REF, NotedFaults, follower, save, step_of, train, update
from tests.gc.stores import open_store
from tests.integrations.exporting.states import small_blocks

SHAPE = ROWS, COLUMNS = 64, 256
HALF = {"rows": (ROWS // 2, COLUMNS), "columns": (ROWS, COLUMNS // 2)}


class Rank:
    """A follower of the box at `offsets` of each tensor."""

    def __init__(
        self, backend: MemoryBackend, names: list[str], sizes: tuple[int, ...], offsets: tuple[int, int], host_cache: Path | None = None
    ) -> None:
        self.faults, self.events = NotedFaults(), list[Event]()
        self.tensors = {name: torch.zeros(sizes, dtype=torch.bfloat16) for name in names}
        store = follower(backend, self.faults)
        store.on_event(self.events.append)
        into = {"model": {name: tsck.Box(tensor, SHAPE, offsets) for name, tensor in self.tensors.items()}}
        self.feed = store.follow(REF, into=into, host_cache=host_cache)

    def update(self) -> tuple[float, float]:
        """The stored bytes of what it read, and the bytes of those blocks."""
        self.faults.read_bytes = 0
        update(self.feed)
        fetched = [event for event in self.events if event.kind == "fetched"][-1]
        return float(fetched.fields["read_bytes"]), float(fetched.fields["changed_bytes"])


def test_each_takes_its_part_of_each_version(tmp_path: Path) -> None:
    backend, state = small_blocks(), {"model": {f"l{number}": torch.randn(SHAPE).bfloat16() for number in range(3)}}
    trainer, names = open_store(backend), [*state["model"]]
    whole = Rank(backend, names, SHAPE, (0, 0))
    rows = [Rank(backend, names, HALF["rows"], (at, 0)) for at in (0, ROWS // 2)]
    backend.is_local = False
    columns = [Rank(backend, names, HALF["columns"], (0, at), tmp_path / "shared") for at in (0, COLUMNS // 2)]
    for step in range(4):
        save(trainer, state, step)
        read, changed = whole.update()
        for rank in rows:
            read_by_rank, changed_of_rank = rank.update()
            assert changed_of_rank == changed / 2
            assert read_by_rank < 0.6 * read
        for rank in columns:
            read_by_rank, changed_of_rank = rank.update()
            assert changed_of_rank == changed
            assert step == 0 or rank.faults.read_bytes < read_by_rank / 2  # the last whole blocks are in the folder of the host
        for name, tensor in state["model"].items():
            assert torch.equal(torch.cat([rank.tensors[name] for rank in rows], 0), tensor)
            assert torch.equal(torch.cat([rank.tensors[name] for rank in columns], 1), tensor)
        assert {step_of(rank.feed) for rank in (*rows, *columns)} == {step}
        train(state, step, 0.02)


def test_shares_of_tensors_that_are_intervals_of_the_flattened_one() -> None:
    backend, state = small_blocks(), {"model": {"w": torch.randn(SHAPE).bfloat16()}}
    trainer, flat = open_store(backend), torch.zeros(5000, dtype=torch.bfloat16)
    feed = follower(backend).follow(REF, into={"model": {"w": tsck.FlatShard(flat, SHAPE, 777)}})
    for step in range(3):
        save(trainer, state, step)
        update(feed)
        assert torch.equal(flat, state["model"]["w"].flatten()[777:5777])
        train(state, step, 0.02)
