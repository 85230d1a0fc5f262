"""What somebody does who may only create objects: appends any entry, with any time, under right hashes."""

from collections.abc import Callable, Iterator, Sequence

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import new_ulid, parse_ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import snapshot_closure
from tensorstore_ck.gc.roots import UNDO, roots
from tensorstore_ck.log import ObjectKey, Objects, Op, RefTable
from tensorstore_ck.log.entry import entry_name, seal_entry

DAY_NS = 86_400 * 10**9
Forgery = Callable[[RefTable], Sequence[Op]]


def forge(engine: Engine, make: Forgery, *, age_days: int = 100) -> int:
    """Appends what `make` returns, with a time of long ago, past all that a `Log` checks; returns the number of the entry."""
    head = engine.log.sync()
    ops = [*make(engine.log.view())]
    sealed, _ = seal_entry(
        head.n + 1, head.hash, ops, write_id=engine.new_id(), time_ns=engine.clock() - age_days * DAY_NS, actor="mallory"
    )
    engine.backend.create(entry_name(engine.config.log, head.n + 1), sealed)
    return head.n + 1


def release_all(view: RefTable) -> Iterator[Op]:
    """Forgets every branch and tag, and removes every pin."""
    yield from (Op.untag(name, view) for name in view.tags())
    yield from (Op.unpin(pin.ulid, pin.owner, view) for pin in view.pins())
    yield from (Op.expire(name, None) for name in view.branches())


def end_all_windows(view: RefTable) -> Iterator[Op]:
    """Ends every undo window."""
    yield from (Op.purge(window.n, window.name) for window in view.windows())


def pin_with_a_past_date(view: RefTable) -> Iterator[Op]:
    """Replaces every pin by one that has run out."""
    for pin in view.pins():
        info = view.snapshot(pin.ulid)
        assert info is not None
        yield Op.pin(info.root, pin.owner, pin.reason, 1)


def objects_in(backend: Backend, *kinds: str) -> Objects:
    """Every object of these kinds."""
    found = {
        kind: [parse_ulid(info.name[-26:]) for info in backend.list(f"{ObjectKey(kind, new_ulid()).name.split('/')[0]}/")] for kind in kinds
    }
    return Objects(ObjectKey(kind, ulid) for kind, ulids in found.items() for ulid in ulids if ulid is not None)


def condemn_all(backend: Backend, *kinds: str) -> Forgery:
    """Condemns every object."""
    return lambda _: [Op.condemn(objects_in(backend, *kinds))]


def sweep_all(backend: Backend, *kinds: str) -> Forgery:
    """Sweeps every object that is condemned."""
    return lambda _: [Op.sweep(objects_in(backend, *kinds))]


def forget_tombstones(view: RefTable) -> Sequence[Op]:
    """Makes the log forget what was swept."""
    head = view.head()
    return [Op.truncate_tombstones(head.n if head else 0)]


def needed_objects(engine: Engine) -> set[str]:
    """What the snapshots need that are held now, by more than an undo window."""
    view = engine.log.newest_view()
    infos = (view.snapshot(ulid) for ulid, holders in roots(view).items() if holders != [UNDO])
    return {key.name for info in infos if info is not None for key in snapshot_closure(engine, view, info)}
