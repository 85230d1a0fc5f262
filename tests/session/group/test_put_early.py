"""A rank that fails before it has anything to save, because of its own wrong options, or when it cannot read the log."""

import threading
from typing import Any

import pytest
import torch.distributed

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.errors import StoreError
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.session.group import Group
from tensorstore_ck.session.save import rank_round
from tensorstore_ck.store import Store
from tests.effort import PATIENCE_SECONDS
from tests.end_to_end.crash.faulty import Faults, FaultyBackend


class FakeProcessGroup:
    """What a store asks of a process group."""

    def __init__(self, store: object, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks

    def get_group_store(self) -> object:
        return self._store

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    "wrong",
    [{"step": "one"}, {"step": -1}, {"metadata": {"a": object()}}, {"metrics": {"a": "b"}}, {"expect": "no root"}, {"ref": "a b"}, {}],
)
def test_it_is_with_the_others_again(wrong: dict[str, Any], odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins the round as the others do, or ranks would count differently from then on. Without `wrong` it cannot read the log."""
    monkeypatch.setattr(rank_round, "describer_of", lambda group: None)
    monkeypatch.setitem(Group.begin.__kwdefaults__, "grace", 0.01)  # type: ignore[arg-type] # how long rank 1 leaves it to rank 0 to go on
    dist: Any = torch.distributed
    store, backend = dist.HashStore(), MemoryBackend()
    init_store(backend)
    endings: list[list[str]] = [[], []]

    def live(rank: int) -> None:
        faults = Faults()
        config = read_config(backend)
        assert config is not None
        faulty = FaultyBackend(backend, faults, atomic_put=True)
        group: Any = FakeProcessGroup(store, rank, 2)
        with Store(make_engine(faulty, config, MemoryTable(), sleep=lambda _: None)) as mine:
            for step in range(2):
                arguments: dict[str, Any] = {"ref": "job", "step": step, "group": group, "timeout_seconds": PATIENCE_SECONDS / 2}
                if step == 0 and rank == odd:
                    arguments |= wrong
                    faults.mode, faults.at, faults.persistent = "unavailable", 0 if wrong else faults.calls + 1, True
                try:
                    endings[rank].append(mine.put_snapshot({"a": step}, **arguments).root)
                except StoreError as exc:
                    endings[rank].append(str(exc))
                faults.at = 0

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert [len(ending) for ending in endings] == [2, 2]
    assert f"rank {odd}: " in endings[1 - odd][0]
    assert endings[0][1] == endings[1][1]
    assert len(endings[0][1]) == 64
