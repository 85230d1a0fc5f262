"""Copies refs and their blocks between any two stores: incremental, verified, resumable.

blocks.py      carries a piece: encoded blocks from packs to packs
snapshots.py   copies one snapshot and publishes it
history.py     how far the target's branch follows the source's
refs.py        which refs, and in which order
report.py      what was done
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.maintenance.copy_store.blocks import Pace
from tensorstore_ck.maintenance.copy_store.refs import copy_refs
from tensorstore_ck.maintenance.copy_store.report import CopiedRef, CopyReport, Progress

__all__ = ["CopiedRef", "CopyReport", "Pace", "Progress", "RateLimit", "copy", "copy_refs"]


class OpenStore(Protocol):
    """An open `Store`."""

    @property
    def engine(self) -> Engine:
        """What it works on."""


@renamed_argument(rate_limit_bytes_per_second="rate_limit")
def copy(
    source: str | os.PathLike[str] | OpenStore,
    target: str | os.PathLike[str] | OpenStore,
    *,
    refs: str | Sequence[str] = (),
    rate_limit: float | str | None = None,
    progress: Progress = lambda done, total: None,
) -> CopyReport:
    """Copies branches with their histories, and tags, from one store to another; only blocks that the target lacks travel.

    Every block is verified before it is written. Roots are the same on both sides. A copy that was interrupted is run again, and goes on.

    Args:
        source: A URL, or an open store.
        target: Likewise; the store must be there.
        refs: Globs over names of branches and tags, like ``runs/*``; all of them by default.
        rate_limit: Reads, and writes, no more than that a second: ``"100MB"``, or bytes.
        progress: Told of the content that has to be copied.

    Raises:
        ConflictError: a ref has other snapshots in the target; it is left as it is. All others were copied.
        DamageError: a snapshot of the source cannot be read; it and what follows it on its ref was not copied. Or a ref of the source is
            at one that is marked damaged, which was left out. All other refs were copied.
        NotFoundError: a glob fits no ref.
    """
    globs = (refs,) if isinstance(refs, str) else tuple(refs)
    pace = Pace.limited(rate_limit)
    with ExitStack() as stack:
        engines = _engine(source, stack, read_only=True), _engine(target, stack)
        report = copy_refs(*engines, refs=globs, pace=pace, progress=progress)
    errors = [ref.error for ref in report.refs if ref.error is not None]
    for other in errors[1:]:
        errors[0].add_note(f"also: {other}")
    if errors:
        raise errors[0]
    return report


def _engine(place: str | os.PathLike[str] | OpenStore, stack: ExitStack, *, read_only: bool = False) -> Engine:
    if not isinstance(place, str | os.PathLike):
        return place.engine
    engine = open_engine(place, read_only=read_only)
    stack.callback(engine.close)
    return engine
