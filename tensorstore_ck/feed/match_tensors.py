"""Which tensor of the follower takes which stored tensor, by name. Only tensors are followed: other values are left out on both sides."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tensorstore_ck.common.units import listed
from tensorstore_ck.engine.interfaces import SnapshotContent, WantedBox
from tensorstore_ck.errors import MismatchError, UnsupportedValueError
from tensorstore_ck.feed.followed_tensor import FollowedTensor, SeveralTensors
from tensorstore_ck.format.tree import Container, Leaf, Tree, leaves, parse
from tensorstore_ck.state.fill_in_place import FillTask, is_alias
from tensorstore_ck.state.load_report import LoadReport
from tensorstore_ck.state.match_target import is_whole
from tensorstore_ck.state.restore_into import RestorePlan
from tensorstore_ck.state.select import Rename, Selection, missing_names
from tensorstore_ck.state.sharded_tensors import SpreadDescriber, group_ranks, share_of


class Wanted(NamedTuple):
    """What is followed, and how."""

    into: object
    select: Sequence[str] | str | None
    rename: Rename | None
    dtype: torch.dtype | None


class Matched(NamedTuple):
    """The followed tensors of one snapshot."""

    tensors: list[FollowedTensor]
    boxes: list[WantedBox]
    """What of the stored tensors is read, and into which of `tensors`."""


def match_tensors(content: SnapshotContent, wanted: Wanted, what: str) -> Matched:
    """Matches the tensors of `wanted.into` with those of a snapshot, which `what` names in messages.

    Raises:
        MismatchError: names, shapes or dtypes differ, or a glob of `select` matches nothing.
        UnsupportedValueError: a tensor cannot be followed.
    """
    stored = parse(content.layout, len(content.values))
    tree: Tree | None = stored
    selection = None if wanted.select is None else Selection(wanted.select)
    if selection is not None and tree is not None:
        selection.require_used(tree)
        tree = selection.prune(tree)
    tree = _tensors_of_tree(tree) if tree is not None else None
    state = _tensors_of(wanted.into)
    if tree is None or state is None:
        where = "`into`" if state is None else what
        raise MismatchError(f"{where} has no tensor to follow: pass a module or a dict of tensors, and see select=", object_id="into")
    rename = wanted.rename
    if rename is None and isinstance(wanted.into, torch.nn.Module):
        rename = {_extra_prefix([leaf.path for leaf in leaves(tree)], state): ""}
    is_missing = None if selection is None else missing_names(selection, rename, stored)
    plan = RestorePlan(
        content=content, tree=tree, whole=stored, is_missing=is_missing, rename=rename, dtype=wanted.dtype, describer=_describer()
    )
    plan.visit(state, "", plan.root, 0)
    report = LoadReport()
    plan.check(strict=False, report=report, unclaimed=None)
    _require_fit(report, what)
    if plan.wanted or plan.adopted:
        raise UnsupportedValueError(
            "follow needs tensors with their own memory, not tensors on the meta device or shares of stored views: make them first",
            object_id="into",
        )
    matched = _match_whole(content, plan.fills)
    for task in plan.shares:
        for number, piece in enumerate(task.share.boxes()):
            followed = FollowedTensor(f"{task.name} {number}", piece.tensor, task.stored)
            matched.tensors.append(followed)
            matched.boxes.append(WantedBox(task.tensor, piece.box, followed))
    return matched


def _describer() -> SpreadDescriber | None:
    """Of tensors that are spread over the ranks of this process's job, if it is one of several ranks."""
    distributed = torch.distributed
    return (
        SpreadDescriber(group_ranks(None), distributed.get_rank()) if distributed.is_available() and distributed.is_initialized() else None
    )


def _tensors_of(state: object) -> Any:
    """The tensors of a state in plain dicts; None if there are none."""
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    if isinstance(state, torch.Tensor) or share_of(None, state, "") is not None:
        return state
    if isinstance(state, Mapping):
        items = dict(state)
    elif isinstance(state, list | tuple):
        items = dict(zip(getattr(type(state), "_fields", range(len(state))), state, strict=True))
    else:
        return None
    kept = {key: found for key, child in items.items() if (found := _tensors_of(child)) is not None}
    return kept or None


def _tensors_of_tree(tree: Tree) -> Tree | None:
    """`tree` without plain values."""
    if isinstance(tree, Leaf):
        return tree if tree.kind != "value" else None
    if tree.node[0] == "r":
        return tree if any(leaf.kind != "value" for leaf in leaves(tree)) else None
    pairs = [(key, kept) for key, child in zip(tree.keys, tree.children, strict=True) if (kept := _tensors_of_tree(child)) is not None]
    if not pairs:
        return None
    return Container(
        node=["d", [], []], path=tree.path, keys=[key for key, _ in pairs], children=[child for _, child in pairs], attributes=None
    )


def _extra_prefix(stored: Sequence[str], module: Mapping[str, object]) -> str:
    """What all stored names begin with and the module's names lack, such as ``model``; '' if names fit as they are."""
    prefix = ""
    while not any(name[len(prefix) :] in module for name in stored):
        heads = {name[len(prefix) :].partition(".")[0] for name in stored}
        if len(heads) > 1 or any("." not in name[len(prefix) :] for name in stored):
            return ""
        prefix += f"{heads.pop()}."
    return prefix


def _require_fit(report: LoadReport, what: str) -> None:
    parts = [
        f"{len(names)} {problem}: {listed(names)}"
        for problem, names in (
            ("missing in the snapshot", report.missing),
            ("not in `into`", report.unexpected),
            ("do not match", report.mismatched),
        )
        if names
    ]
    if parts:
        raise MismatchError(
            f"{what} does not fit `into`, which stays as it is; {'; '.join(parts)}. Follow with a model of that shape, or see select=, "
            "rename= and dtype=",
            object_id=(report.missing + report.unexpected + report.mismatched)[0].partition(":")[0],
        )


def _match_whole(content: SnapshotContent, fills: Sequence[FillTask]) -> Matched:
    whole: defaultdict[int, list[FillTask]] = defaultdict(list)
    views = []
    for fill in fills:
        target = fill.target
        if not isinstance(target, torch.Tensor) or not isinstance(fill.form.dtype, torch.dtype) or target.is_conj() or target.is_neg():
            raise UnsupportedValueError(
                f"follow fills plain torch tensors, and {fill.name} is none: leave it out with select=", object_id=fill.name
            )
        if fill.leaf.kind == "view" and not is_whole(fill.form, content.layout.tensors[fill.leaf.index]):
            views.append(fill)
        elif fill.target.nbytes:
            whole[fill.leaf.index].append(fill)
    for view in views:
        if not any(is_alias(fill, view) for fill in whole[view.leaf.index]):
            raise UnsupportedValueError(
                f"{view.name} is stored as a view of another tensor, and does not share its memory here: share it, or use checkout",
                object_id=view.name,
            )
    matched = Matched([], [])
    for number, members in whole.items():
        distinct = {(fill.target.data_ptr(), fill.target.dtype, fill.target.stride()): fill for fill in members}
        followed = [FollowedTensor(fill.name, fill.target, fill.form.dtype) for fill in distinct.values()]  # type: ignore[arg-type]
        matched.tensors.extend(followed)
        target = followed[0] if len(followed) == 1 else SeveralTensors(followed)
        matched.boxes.append(WantedBox(number, content.layout.tensors[number].whole, target))
    return matched
