"""What actors do, and the stores that they begin with: as small as can be, so that everything can be explored."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState, ListedSources
from tensorstore_ck.engine.write.publish import check_expected
from tensorstore_ck.engine.write.request import ANY, Expected, SaveRequest
from tensorstore_ck.engine.write.write_and_commit import save_captured
from tensorstore_ck.errors import BackendUnavailableError, ConflictError, NoSpaceError, NotFoundError, UndecidedError
from tensorstore_ck.format.layout import Layout, TensorSpec
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.gc.collect import run_gc
from tensorstore_ck.gc.free_dropped import free_dropped
from tensorstore_ck.gc.options import GcOptions
from tensorstore_ck.log import Op, RefTable, SnapshotRow
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store
from tests.gc.interleavings.actor import Actor, Outcome, Process, copy_table, make_process, process_of
from tests.gc.interleavings.contents import MODIFIED_NS, Contents, Space
from tests.gc.interleavings.invariant import BLOCK_BYTES, CONFIG, Invariant, block, read_back
from tests.gc.interleavings.schedule import Case, Violation

SETUP: Final = 0xFFFE
FAILED: Final = (BackendUnavailableError, UndecidedError)
"""How a backend's fault appears to the caller: it says nothing of what happened."""
REFUSED: Final = (ConflictError, NoSpaceError)
"""What says that nothing happened."""


class Verdict(NamedTuple):
    """What a rank returns to the caller of a save of many ranks."""

    txn: bytes
    published: bool


class Tensor:
    """A `ByteSource` over bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = bytearray(data)
        self.size_bytes = len(data)

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(self._data)[start:stop]


def captured(labels: Sequence[str]) -> CapturedState:
    """A state of one tensor per label."""
    specs = [TensorSpec(str(number), "uint8", 1, (BLOCK_BYTES,)) for number in range(len(labels))]
    return CapturedState(Layout(specs, ["l", list(range(len(labels)))]), [], [], ListedSources(Tensor(block(label)) for label in labels))


def put_labels(engine: Engine, ref: str, labels: str, *, step: int | None = None, expect: Expected = ANY) -> SnapshotRow:
    """What `Store.put_snapshot` does: one tensor per word of `labels`."""
    words = labels.split()
    view = _synced(engine)
    check_expected(engine, view, ref, expect)
    branch = view.branch(ref)
    before = branch.root if branch else None
    return save_captured(
        engine, captured(words), SaveRequest(ref, step, before, expect, encode_metadata({"labels": words}), {}, nearest=before)
    )


def _synced(engine: Engine) -> RefTable:
    engine.log.sync()
    return engine.log.view()


def root_of(engine: Engine, ref: str) -> Digest:
    """Where a branch or tag is."""
    branch = engine.log.view().branch(ref)
    root = branch.root if branch else engine.log.view().tag(ref)
    if root is None:
        raise NotFoundError(f"there is no ref {ref!r}", object_id=ref)
    return root


class Scene:
    """A store being set up, by real code without any fault."""

    def __init__(self) -> None:
        self.backend = MemoryBackend(clock=lambda: MODIFIED_NS)
        self.backend.create("store.json", CONFIG.encode())
        self.table = MemoryTable()
        self._process = make_process(self.backend, CONFIG, SETUP, self.table)._replace(table=self.table)
        self.engine = self._process.engine()

    def put(self, ref: str, labels: str, *, step: int | None = None) -> SnapshotRow:
        """A snapshot that is there when the actors begin."""
        return put_labels(self.engine, ref, labels, step=step)

    def forget(self, *addresses: str) -> None:
        """What is forgotten before the actors begin."""
        Store(self.engine).forget(*addresses)

    def purge(self) -> None:
        """Ends all undo windows before the actors begin."""
        self.engine.log.append(lambda view: [Op.purge(window.n, window.name) for window in view.windows()])

    def gc(self, *, compact: bool = False, settle: bool = False) -> None:
        """A whole run of gc before the actors begin."""
        collector("gc", compact=compact, settle=settle).run(self._process)

    def host(self) -> MemoryTable:
        """What a host has cached that saw everything until now."""
        self.engine.log.sync()
        return copy_table(self.table)

    def case(self, *actors: Actor, faults: Sequence[str] = (), max_faults: int = 1) -> Case:
        """The case of these actors in this store. Every actor's error is a violation, unless it may raise it."""
        invariant = Invariant(CONFIG)

        def check_outcome(number: int, outcome: Outcome, contents: Contents) -> None:
            actor = actors[number]
            if outcome.error is not None and not isinstance(outcome.error, actor.may_raise):
                raise Violation(f"{actor.name} failed: {outcome.error!r}")
            folded = invariant.folded(contents)
            puts = folded.puts
            if isinstance(outcome.value, Verdict):
                ended = RefTable(folded.table).outcome(outcome.value.txn)
                if outcome.value.published is not (ended is not None and ended.put):
                    raise Violation(f"{actor.name} was told that the put was {'' if outcome.value.published else 'not '}published")
            if isinstance(outcome.value, SnapshotRow) and outcome.value.ulid not in puts:
                raise Violation(f"{actor.name} was told that its snapshot is published, and it is not")
            if isinstance(outcome.error, REFUSED) and any(process_of(ulid) == number + 1 for ulid in puts):
                raise Violation(f"{actor.name} was told that its snapshot is not published, and it is")

        return Case(
            CONFIG,
            Space().of(self.backend),
            actors,
            invariant.check,
            invariant.read_all,
            check_outcome,
            faults=faults,
            max_faults=max_faults if faults else 0,
        )


def writer(
    name: str,
    ref: str,
    labels: str,
    *,
    table: MemoryTable | None = None,
    expect: Expected = ANY,
    may_raise: tuple[type[BaseException], ...] = (),
) -> Actor:
    """Saves one snapshot."""
    return Actor(name, lambda process: put_labels(process.engine(), ref, labels, expect=expect), table, may_raise)


def user(
    name: str, act: Callable[[Store], object], *, table: MemoryTable | None = None, may_raise: tuple[type[BaseException], ...] = FAILED
) -> Actor:
    """Opens the store and does something with it."""
    return Actor(name, lambda process: act(Store(process.engine())), table, may_raise)


def reader(name: str, ref: str, *, table: MemoryTable | None = None, may_raise: tuple[type[BaseException], ...] = FAILED) -> Actor:
    """Opens the newest snapshot of a ref, and reads all of it."""

    def run(process: Process) -> object:
        engine = process.engine()
        engine.log.sync()
        info = engine.log.view().by_root(root_of(engine, ref))
        assert info is not None
        return read_back(engine, info)

    return Actor(name, run, table, may_raise)


def collector(name: str, *, table: MemoryTable | None = None, compact: bool = False, settle: bool = False) -> Actor:
    """One whole run of gc, that waits for nothing."""
    options = GcOptions(
        min_age_seconds=0,
        undo_window_seconds=0,
        max_delete=1,
        compact_below=0.9 if compact else 0,
        tombstone_seconds=0 if settle else 1e9,
    )
    return Actor(name, lambda process: run_gc(process.engine(), options).deleted, table, FAILED)


def freer(name: str, ref: str, *, table: MemoryTable | None = None) -> Actor:
    """Frees what the policy of a branch dropped, as if that was long ago: what others have just dropped it would leave."""

    def run(process: Process) -> object:
        return free_dropped(process._replace(clock=lambda: MODIFIED_NS + 2 * 86_400 * 10**9).engine(), ref)

    return Actor(name, run, table, FAILED)
