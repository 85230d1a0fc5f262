"""A store and three ranks that save to it, in simulated time; and what must be true of it afterwards."""

from typing import Final

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.errors import SnapshotAbortedError, StoreError
from tensorstore_ck.gc import run_gc
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.maintenance.fsck import run_fsck
from tensorstore_ck.session.restoring import open_rank_state
from tests.gc.stores import AT_ONCE, counts
from tests.session.group.putting import (
    new_backend,
    open_engine,
    own_of,
    putting_ranks,
    require_agreement,
    tensors_of,
)
from tests.session.group.simulation import Fault, Simulation
from tests.session.group.states import Spreading
from tests.session.group.stores import read_tensor

RANKS: Final = 3
STEPS: Final = (1, 2, 3)
SECOND: Final = 1
"""The save that goes wrong: what it relies on is there, and one more comes after it."""
AGAIN: Final = 10
"""The step that the remaining ranks save as a new group."""
ROWS: Final = 4 * RANKS - 1


class World:
    """A store, and a group of ranks that save to it."""

    def __init__(self, *, faults: tuple[Fault, ...] = (), seed: int = 0) -> None:
        self.backend = new_backend()
        self.simulation = Simulation(seed, faults=faults)
        self.group = putting_ranks(self.simulation, self.backend, RANKS, STEPS, faulty=SECOND)

    def run(self, *, gone: frozenset[int] = frozenset()) -> None:
        self.simulation.run()
        require_agreement(self.group, self.engine, gone=gone)

    @property
    def engine(self) -> Engine:
        """A handle of somebody else."""
        engine = open_engine(self.simulation, self.backend)
        engine.log.sync()
        return engine

    def reasons(self, number: int = SECOND) -> set[str]:
        """Why a save failed, in the words of all ranks."""
        return {str(error) for error in self.errors(SnapshotAbortedError, number)}

    def refusals(self, kind: type[StoreError], number: int = SECOND) -> set[str]:
        """The same for a save that one class of error ended on all ranks."""
        return {str(error) for error in self.errors(kind, number)}

    def errors(self, kind: type[StoreError], number: int = SECOND) -> list[BaseException | None]:
        """How a save ended, on all ranks with this very class."""
        errors = [rank.endings[number].error for rank in self.group]
        assert {type(error) for error in errors} == {kind}, errors
        return errors

    def steps(self) -> list[int]:
        """What is visible, oldest first."""
        return sorted(info.step or 0 for info in self.engine.log.view().snapshots())


def ranks_at(step: int) -> int:
    return RANKS - (step == AGAIN)


def tensors_at(step: int) -> dict[str, Spreading]:
    return tensors_of(step, ranks_at(step), ROWS)


def require_restorable(engine: Engine, steps: list[int]) -> None:
    """What is visible is what was saved, and fsck finds nothing wrong with it."""
    infos = list(engine.log.view().snapshots())
    assert sorted(info.step or 0 for info in infos) == sorted(steps)
    for info in infos:
        assert info.step is not None
        reader = require_readable(engine, info)
        assert reader.values[:2] == ["text", info.step]
        for rank in range(ranks_at(info.step)):
            own = open_rank_state(engine, info, rank)
            expected_own = own_of(info.step, rank)
            assert read_tensor(own, 0) == expected_own.sources[0].read(0, 16)
    report = run_fsck(engine)
    assert report.ok, report.findings


def require_readable(engine: Engine, info: SnapshotRow) -> SnapshotReader:
    """Its tensors are what was saved."""
    reader = SnapshotReader(engine, info)
    for number, expected in enumerate(tensors_at(info.step or 0).values()):
        assert read_tensor(reader, number) == expected.whole.tobytes(), (info.step, number)
    return reader


def require_no_garbage(engine: Engine) -> None:
    """Orphans are gc's."""
    run_gc(engine, AT_ONCE)
    infos = list(engine.log.view().snapshots())
    assert counts(engine.backend)["snapshots"] == len(infos)
    assert counts(engine.backend)["parts"] == sum(len(engine.read_record(info).parts) for info in infos)
