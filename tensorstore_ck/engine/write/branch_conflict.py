"""The error for a branch that is not where a save expected it: who moved it, and commands with which neither side is lost."""

import shlex
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.engine import Engine, current_actor
from tensorstore_ck.errors import ConflictError, StoreError
from tensorstore_ck.log import BranchHead, RefTable
from tensorstore_ck.log.field_checks import is_ref_name

MAX_TRIES: Final = 9


def moved_away(engine: Engine, view: RefTable, branch: BranchHead, expected: Digest | None) -> ConflictError:
    """The error of a save that expected `branch` at another root, or not to exist. Reads the one log entry that moved it.

    Every command in it works as printed, at `view`.
    """
    ref, root, where = branch.name, branch.root.hex()[:16], shlex.quote(engine.backend.url)
    own = "" if expected is None else expected.hex()[:16]
    seen = f"this store handle last saw {own} there" if own else "this store handle has not restored it"
    kept, free = _names(view, branch)
    keep = f"branch {kept!r} keeps the other one" if kept else f"keep the other one with `tsck branch {free} {root} -s {where}`"
    is_published = expected is not None and view.by_root(expected) is not None
    reset = f"move the branch back with `tsck reset {ref} {own} -s {where}` and save again, or " if is_published else ""
    return ConflictError(
        f"ref {ref!r} is at {root}, and {seen}: {_mover(engine, branch)} moved it ({moved_by(engine, branch)}). To continue "
        f"what is there: checkout({ref!r}). To continue what is here, and lose neither: {keep}; then {reset}save on top of it with "
        f"expect={root!r}",
        object_id=ref,
    )


def moved_by(engine: Engine, branch: BranchHead) -> str:
    """Who moved a branch to where it is, and when: ``to step 1, by me@host:42 at 2026-01-31 12:00:00 UTC``."""
    actor = _actor(engine, branch)
    who = f"by {actor} " if actor else ""
    to = "" if branch.step is None else f"to step {branch.step}, "
    return f"{to}{who}at {datetime.fromtimestamp(branch.time_ns // 1_000_000_000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _mover(engine: Engine, branch: BranchHead) -> str:
    """The process, as far as this one knows it: a rerun of one's own script is the usual reason."""
    actor, own = _actor(engine, branch), current_actor()
    if actor == own:
        return "this process, through another store handle,"
    if actor.rpartition(":")[0] == own.rpartition(":")[0]:
        return "an earlier run of yours on this host, or one that is still running,"
    return "another process"


def _actor(engine: Engine, branch: BranchHead) -> str:
    with suppress(StoreError):  # the conflict is more important
        entry = engine.log.chain.read(branch.n)
        return "" if entry is None else entry.actor
    return ""


def branch_command(engine: Engine, view: RefTable, branch: BranchHead) -> str:
    """A command that makes another branch where `branch` is."""
    return f"tsck branch {_names(view, branch)[1]} {branch.root.hex()[:16]} -s {shlex.quote(engine.backend.url)}"


def _names(view: RefTable, branch: BranchHead) -> tuple[str, str]:
    """The name of a branch that such a command made there before, or empty; and a free name."""
    short = branch.root.hex()[:8]
    name = f"{branch.name}-{short}"
    if not is_ref_name(f"{name}-{MAX_TRIES}"):
        name = f"kept/at-{short}"
    tries = [name, *(f"{name}-{number}" for number in range(2, MAX_TRIES + 1))]
    kept = (other for other in tries if (there := view.branch(other)) is not None and there.root == branch.root)
    free = (other for other in tries if view.branch(other) is None and view.tag(other) is None)
    return next(kept, ""), next(free, tries[-1])
