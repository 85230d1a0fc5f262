"""Each rule of the protocol is needed: with any one of them off, a schedule that loses something is found; with all on, none.

That also shows that the explorer can see each kind of loss. The rules are those of gc/PROTOCOL.md.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import pytest

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine import opening, reachability
from tensorstore_ck.engine.write import publish
from tensorstore_ck.gc.compact import CompactedPack
from tensorstore_ck.gc.live_set import LiveSet
from tensorstore_ck.gc.plan import Planner
from tensorstore_ck.log import ObjectKey, Objects, Op, RefTable, table_rows
from tensorstore_ck.store import Store
from tests.gc.interleavings import ranks as many
from tests.gc.interleavings.actor import Actor, Process
from tests.gc.interleavings.ranks import rank
from tests.gc.interleavings.scenes import Scene, collector, put_labels, user
from tests.gc.interleavings.schedule import Case, Violation, explore, replay
from tests.gc.interleavings.test_gc import FALLIBLE, GONE, dying, saver, settler, sparse

pytestmark = [pytest.mark.slow, pytest.mark.race]

Patch = pytest.MonkeyPatch


def gc_and_writer() -> Case:
    scene, host = dying()
    return scene.case(collector("G", table=host), saver(host, "x q"))


def gc_that_settles_and_writer() -> Case:
    scene, host = dying()
    return scene.case(collector("G", table=host, settle=True), saver(host, "x q"))


def gc_writer_and_settler() -> Case:
    scene, host = dying()
    return scene.case(collector("G", table=host), saver(host, "x q"), settler(host))._replace(max_switches=3)


def compactor_and_writer() -> Case:
    scene, host = sparse()
    return scene.case(collector("G", table=host, compact=True), saver(host, "x y"))


def compactor_gc_and_settler() -> Case:
    scene, host = sparse()
    return scene.case(collector("G", table=host, compact=True), collector("H", table=host), settler(host))._replace(max_switches=3)


def two_compactors() -> Case:
    scene, host = sparse()
    return scene.case(*(collector(name, table=host, compact=True) for name in "GH"))._replace(max_switches=3)


def relocated_and_released() -> Case:
    """A snapshot whose part names a pack that was compacted and is gone. It is let go, and so is its way to the new pack; then tagged."""
    scene = Scene()
    scene.put("job", "x y", step=0)
    info = scene.put("job", "y z", step=1)
    scene.forget("job@0")
    scene.gc(compact=True)
    scene.put("job", "w", step=2)
    scene.forget("job@1")
    scene.purge()
    host = scene.host()
    ((_, ulid),) = scene.engine.log.view().all_relocations()
    moved = Objects([ObjectKey("moved", ulid)])

    def end_relocation(store: Store) -> object:
        store.engine.log.append(lambda view: [] if view.is_live(info.ulid) else [Op.condemn(moved)])
        return store.engine.log.append(lambda _view: [Op.sweep(moved)]).n

    return scene.case(
        user("M", end_relocation, table=host),
        settler(host),
        user("U", lambda store: store.tag("t", info.root.hex()), table=host, may_raise=GONE),
    )


def compactor_and_settling_gc() -> Case:
    scene, host = sparse()
    gcs = (collector("G", table=host, compact=True), collector("H", table=host, settle=True))
    return scene.case(*gcs)._replace(max_switches=3)


def ranks_and_gc() -> Case:
    scene, host = dying()
    ranks = (rank(f"R{number}", number, labels, table=host) for number, labels in enumerate(("x q", "x r")))
    return scene.case(*ranks, collector("G", table=host, settle=True))._replace(max_switches=2)


def ranks_of_which_one_forsakes() -> Case:
    scene, host = dying()
    return scene.case(rank("R0", 0, "x q", table=host), rank("R1", 1, "x r", table=host, gives_up_in_log=False))


def names_that_come_again() -> Case:
    """A save that starts over draws the names that it drew before."""
    scene, host = dying()

    def act(process: Process) -> object:
        drawn: list[Ulid] = []

        def new_id() -> Ulid:
            drawn.append(process.new_id() if len(drawn) < NAMES_OF_A_PUT else drawn[len(drawn) % NAMES_OF_A_PUT])
            return drawn[-1]

        return put_labels(process.engine(new_id=new_id), "other", "x q", expect=None)

    return scene.case(collector("G", table=host, settle=True), Actor("A", act, host, FALLIBLE))


NAMES_OF_A_PUT: Final = 4
"""Pack, part, record, log entry."""


# --- rules off ----------------------------------------------------------------------------------------------------------------


def no_rescue(patch: Patch) -> None:
    def condemned_among(*args: Any) -> Objects:
        checked(*args)
        return Objects()

    checked = reachability.condemned_among
    patch.setattr(reachability, "condemned_among", condemned_among)
    patch.setattr(publish, "condemned_among", condemned_among)


def no_own_part(patch: Patch) -> None:
    def condemned_among(view: RefTable, needed: Iterable[ObjectKey], *rest: Any) -> Objects:
        return checked(view, [key for key in needed if key.kind not in ("part", "snapshot")], *rest)

    checked = reachability.condemned_among
    patch.setattr(publish, "condemned_among", condemned_among)


def no_swept_check(patch: Patch) -> None:
    def condemned_among(view: RefTable, needed: Iterable[ObjectKey], *rest: Any) -> Objects:
        states = {key: view.object_state(key) for key in needed}
        return checked(view, [key for key, state in states.items() if state is None or not state.swept], *rest)

    checked = reachability.condemned_among
    patch.setattr(publish, "condemned_among", condemned_among)


def condemn_by_the_mark(patch: Patch) -> None:
    def once(self: LiveSet, view: RefTable) -> None:
        if not self._snapshots:
            update(self, view)

    update = LiveSet.update
    patch.setattr(LiveSet, "update", once)


def no_horizon(patch: Patch) -> None:
    def condemned_among(view: RefTable, needed: Iterable[ObjectKey], _anchor: int, what: str) -> Objects:
        return checked(view, needed, view.horizon(), what)

    checked = reachability.condemned_among
    patch.setattr(publish, "condemned_among", condemned_among)


def no_index_removal(patch: Patch) -> None:
    patch.setattr(opening, "forget_packs", lambda _batch, _packs: None)


def no_coverage(patch: Patch) -> None:
    def moved(self: CompactedPack, view: RefTable, _needed: Any) -> list[Op]:
        return operations(self, view, self.entries)

    operations = CompactedPack.operations
    patch.setattr(CompactedPack, "operations", moved)


def no_target_check(patch: Patch) -> None:
    def moved(self: CompactedPack, view: RefTable, needed: Any) -> list[Op]:
        if view.object_state(ObjectKey("pack", self.pack)) is not None or not np.isin(needed, self.entries).all():
            return []
        return [Op.relocate(self.pack, self.ulid, self.hash, self.targets), Op.condemn(Objects([ObjectKey("pack", self.pack)]))]

    patch.setattr(CompactedPack, "operations", moved)


def no_anchor_of_relocations(patch: Patch) -> None:
    def mark_later(self: Planner, anchor: int, view: RefTable) -> None:
        mark(self, anchor, view)
        self.anchor = 1 << 62

    mark = Planner._mark
    patch.setattr(Planner, "_mark", mark_later)


def no_check_at_the_leaders_head(patch: Patch) -> None:
    def rescue(*args: Any) -> list[Op]:
        return checked(*args) if len(args[3]) == 1 else []

    checked = many.rescue
    patch.setattr(many, "rescue", rescue)


def giving_up_without_an_abort(_patch: Patch) -> None:
    """The case itself does."""


def unique_names_drawn_twice(_patch: Patch) -> None:
    """The case itself does."""


def no_tombstone_of_relocated_packs(patch: Patch) -> None:
    def settle(batch: Any, view: RefTable, entry: Any, op: Any) -> None:
        horizon = min(op["n"], entry.n - 1)
        for key, state in list(view.objects()):
            if state.swept and state.n <= horizon:
                table_rows.OBJECTS.delete(batch, table_rows.object_key(key))
        table_rows.HORIZON.put(batch, b"", table_rows.EntryRow(max(horizon, view.horizon())))

    module = importlib.import_module("tensorstore_ck.log.fold")
    patch.setattr(module, "_APPLY", {**module._APPLY, "settle": settle})


RULES: Final[list[tuple[Callable[[Patch], None], Callable[[], Case]]]] = [
    (no_rescue, gc_and_writer),
    (no_own_part, gc_and_writer),
    (no_swept_check, gc_and_writer),
    (condemn_by_the_mark, gc_and_writer),
    (no_horizon, gc_that_settles_and_writer),
    (no_index_removal, gc_writer_and_settler),
    (no_coverage, compactor_and_writer),
    (no_target_check, two_compactors),
    (no_anchor_of_relocations, compactor_and_settling_gc),
    (no_tombstone_of_relocated_packs, relocated_and_released),
    (no_check_at_the_leaders_head, ranks_and_gc),
    (giving_up_without_an_abort, ranks_of_which_one_forsakes),
    (unique_names_drawn_twice, names_that_come_again),
]


@pytest.mark.parametrize(("rule_off", "make"), RULES, ids=lambda value: value.__name__)
def test_each_rule_is_needed(rule_off: Callable[[Patch], None], make: Callable[[], Case]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        rule_off(patch)
        with pytest.raises(Violation) as caught:
            explore(make())
        print(caught.value)
        with pytest.raises(Violation, match=caught.value.what.partition("\n")[0].split(" ")[0]):
            replay(make(), caught.value.schedule)


@pytest.mark.parametrize("make", [relocated_and_released, compactor_and_settling_gc, ranks_and_gc], ids=lambda make: make.__name__)
def test_with_all_rules_nothing_is_lost(make: Callable[[], Case]) -> None:
    """For the cases that are not in the other files."""
    assert explore(make()).states > 100
