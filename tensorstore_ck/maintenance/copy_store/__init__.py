"""Copies refs and their blocks between two stores: incremental, verified, resumable.

copy_histories.py  chooses and copies refs with their histories, oldest snapshots first
branch_plan.py     compares the histories of a branch in both stores
copy_snapshot.py   copies one snapshot and publishes it
blocks.py          copies encoded blocks from packs to packs
report.py          CopyReport
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.maintenance.copy_store.blocks import Pace
from tensorstore_ck.maintenance.copy_store.copy_histories import copy_refs
from tensorstore_ck.maintenance.copy_store.report import CopiedRef, CopyReport, Progress

__all__ = ["CopiedRef", "CopyReport", "Pace", "Progress", "RateLimit", "copy", "copy_refs"]


class OpenStore(Protocol):
    """An open `Store`."""

    @property
    def engine(self) -> Engine:
        """The engine that it works on."""


@short_errors
@renamed_argument(rate_limit_bytes_per_second="rate_limit")
def copy(
    source: str | os.PathLike[str] | OpenStore,
    target: str | os.PathLike[str] | OpenStore,
    *,
    refs: str | Sequence[str] = (),
    rate_limit: float | str | None = None,
    progress: Progress = lambda done, total: None,
) -> CopyReport:
    """Copies branches with their histories, and tags, from one store to another; only blocks that the target lacks are transferred.

    Every block is verified before it is written. Roots are the same in both stores. To resume an interrupted copy, run it again.

    Args:
        source: A URL, or an open store.
        target: A URL of an existing store, or an open store.
        refs: Globs over names of branches and tags, like ``runs/*``; all of them by default.
        rate_limit: Limit of reads, and of writes, of blocks: ``"100MB"``, or bytes per second.
        progress: Receives the progress of the copied content.

    Raises:
        ConflictError: a ref has other snapshots in the target; it was not changed. All others were copied.
        DamageError: a snapshot of the source cannot be read; it and its successors on the ref were not copied. Or the head of a ref is
            marked as damaged in the source, and was left out. All other refs were copied.
        NotFoundError: a glob matches no ref.
        UntrustedError: the user's trust file names a ref, whose signature in the source is not valid. All other refs were copied.
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


def _engine(store: str | os.PathLike[str] | OpenStore, stack: ExitStack, *, read_only: bool = False) -> Engine:
    if not isinstance(store, str | os.PathLike):
        return store.engine
    engine = open_engine(store, read_only=read_only)
    stack.callback(engine.close)
    return engine
