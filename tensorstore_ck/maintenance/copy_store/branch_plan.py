"""Compares the histories of one branch in two stores. Reads refs and logs only."""

import shlex
from typing import NamedTuple

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.branch_conflict import branch_command, moved_by
from tensorstore_ck.errors import ConflictError
from tensorstore_ck.log import BranchMove, RefTable


class BranchPlan(NamedTuple):
    """The snapshots that a branch of the target lacks."""

    name: str
    head: Digest | None
    """The target's head; None: no such branch."""
    moves: list[BranchMove]
    """The moves to make there, in order."""
    is_ahead: bool
    """The target has all of the source's history, and more."""


def plan_branch(source: Engine, target: Engine, name: str, refs: RefTable) -> BranchPlan:
    """Compares a branch of the source, as it is in its `refs`, with the target's.

    The target continues from its head, even if the source has forgotten that snapshot since.

    Raises:
        ConflictError: the histories diverged, or the target has a tag of that name.
    """
    view = target.log.view()
    if view.tag(name) is not None:
        raise ConflictError(
            f"{name!r} is a branch in the source and a tag in {target.backend.url}: remove the tag there (`tsck untag {name} -s "
            f"{shlex.quote(target.backend.url)}`), or give it another name",
            object_id=name,
        )
    moves = list(refs.moves(name, newest_first=False))
    branch = view.branch(name)
    if branch is None:
        return BranchPlan(name, None, moves, is_ahead=False)
    if branch.root == moves[-1].root:
        return BranchPlan(name, branch.root, [], is_ahead=False)
    theirs = [move.root for move in view.moves(name)]
    done = _moves_done(source, name=name, moves=moves, root=branch.root, times=theirs.count(branch.root))
    if done is not None:
        return BranchPlan(name, branch.root, moves[done:], is_ahead=False)
    if moves[-1].root in theirs or _last_move_to(target, name, moves[-1].root) is not None:
        return BranchPlan(name, branch.root, [], is_ahead=True)
    raise ConflictError(
        f"branch {name!r} diverged: {target.backend.url} has it at {branch.root.hex()[:16]} ({moved_by(target, branch)}), which the "
        f"source never had there, and the source at {moves[-1].root.hex()[:16]}. Nothing was copied to it; to take the source's branch and "
        f"keep both, keep the target's under another name (`{branch_command(target, view, branch)}`), forget it under this name "
        f"(`tsck forget {name} -s {shlex.quote(target.backend.url)}`), and copy again",
        object_id=name,
    )


def _moves_done(source: Engine, name: str, moves: list[BranchMove], root: Digest, times: int) -> int | None:
    """How many of the source's moves the target has made; None: it diverged. The target is at `root` for the `times`-th time."""
    at = [number for number, move in enumerate(moves) if move.root == root]
    if at:
        return at[min(times, len(at)) - 1] + 1
    n = _last_move_to(source, name, root)
    return None if n is None else sum(move.n <= n for move in moves)


def _last_move_to(engine: Engine, name: str, root: Digest) -> int | None:
    """The last log entry that moved the branch to `root`, even if that was forgotten since."""
    last = None
    for entry in engine.log.entries():
        for op in entry.ops:
            is_of_branch = op.fields.get("ref" if op.name == "put" else "name") == name
            if is_of_branch and op.name in ("put", "branch", "reset") and op.fields["root"] == root:
                last = entry.n
            elif is_of_branch and op.name == "expire" and op.fields["snapshots"] is None:
                last = None  # a later branch of that name is another one
    return last
