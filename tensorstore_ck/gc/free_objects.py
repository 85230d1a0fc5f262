"""The steps that free objects: condemn, sweep, delete, and at last truncate the tombstones. PROTOCOL.md says why they are safe."""

import bisect
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final

from tensorstore_ck.common.threads import for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import GcRefusedError
from tensorstore_ck.gc.mark_reachable import LiveSet
from tensorstore_ck.gc.plan import simulate
from tensorstore_ck.log import ObjectKey, Objects, Op, RefTable, pieces

OBJECTS_AN_ENTRY: Final = 40_000
"""16 bytes each: well below the limit of 1 MB per entry."""
DELETE_BATCH: Final = 1000
THREADS: Final = 8


def changed_log(url: str) -> GcRefusedError:
    """Why nothing may be freed by a log that this user has not accepted."""
    return GcRefusedError(
        f"the log of {url} differs from what this user has seen of it, so objects that it does not name may still be needed: "
        "look at the store, and accept the log with `tsck accept-log`"
    )


def condemn(
    engine: Engine,
    live: LiveSet,
    garbage: Sequence[ObjectKey],
    *,
    ending: Callable[[RefTable], Sequence[Op]] = lambda view: (),
    due: Callable[[RefTable], Sequence[ObjectKey]] | None = None,
) -> None:
    """Condemns `garbage` that no root needs at the head that the entry follows; `ending` ends undo windows and pins in the same entry.

    `due` lists condemned objects to sweep. With it, the entry sweeps these and what it condemns: there may be no space for two.
    """

    def build(view: RefTable, batch: Iterable[ObjectKey]) -> list[Op]:
        ops = [*ending(view)]
        live.update(simulate(view, ops) if ops else view)
        chosen = [key for key in batch if view.object_state(key) is None and not live.needs(key)]
        swept = [] if due is None else [*chosen, *due(view)[: OBJECTS_AN_ENTRY // 2]]
        ops += [Op.condemn(Objects(chosen))] if chosen else []
        return ops + ([Op.sweep(Objects(swept))] if swept else [])

    for batch in list(pieces(garbage, OBJECTS_AN_ENTRY if due is None else OBJECTS_AN_ENTRY // 2)) or [Objects([])]:
        engine.log.append(partial(build, batch=batch))


def delete(engine: Engine, swept: Sequence[ObjectKey], deleted: Callable[[int], object] = lambda count: None) -> None:
    """Deletes swept objects; calls `deleted` with each number of them."""

    def delete_batch(keys: Sequence[ObjectKey]) -> None:
        engine.backend.delete([key.name for key in keys])
        deleted(len(keys))

    for_each((swept[at : at + DELETE_BATCH] for at in range(0, len(swept), DELETE_BATCH)), delete_batch, THREADS)


def truncate_tombstones(engine: Engine, seconds: float, *, still_listed: Collection[ObjectKey] = ()) -> None:
    """Drops tombstones older than `seconds`, so that their number stays bounded. Keeps those of objects that are still listed."""
    view, now_ns = engine.log.view(), engine.clock()
    entries = sorted({state.n for key, state in view.objects() if state.swept and key not in still_listed})

    def is_young(n: int) -> bool:
        entry = engine.log.chain.read(n)
        return entry is None or now_ns - entry.time_ns < seconds * 1e9

    old = entries[: bisect.bisect_left(entries, True, key=is_young)]  # entry times ascend, except for clock differences
    if old and old[-1] > view.horizon():
        engine.log.append(lambda view: [Op.truncate_tombstones(old[-1])] if old[-1] > view.horizon() else [])
