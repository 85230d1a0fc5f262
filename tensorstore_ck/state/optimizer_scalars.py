"""Scalars of optimizers, such as step counters: ``dtype=`` of a restore does not convert them, since bfloat16 counts to 256."""

from collections.abc import Collection
from typing import Final

from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.format.tree import Leaf, Tree, parse
from tensorstore_ck.state.allocate import WantedLeaf, form_of

_KEYS: Final = ("state", "param_groups")
"""Keys of the ``state_dict`` of every ``torch.optim`` optimizer."""


def with_exact_scalars(content: SnapshotContent, wanted: Collection[WantedLeaf]) -> Collection[WantedLeaf]:
    """`wanted`, without a conversion of one-element tensors in the state of an optimizer."""
    if {dtype for _, dtype in wanted} <= {None}:
        return wanted
    scalars = _scalars(content)
    return [(leaf, None if leaf.path in scalars else dtype) for leaf, dtype in wanted]


def _scalars(content: SnapshotContent) -> set[str]:
    """Searches the whole snapshot: a selection may lack the keys that identify an optimizer."""
    paths = set()
    pending: list[tuple[Tree, bool]] = [(parse(content.layout, len(content.values)), False)]
    while pending:
        tree, is_inside = pending.pop()
        if not isinstance(tree, Leaf):
            is_inside = is_inside or all(key in tree.keys for key in _KEYS)
            pending += [(child, is_inside) for child in tree.children]
        elif is_inside and tree.kind != "value" and set(form_of(content.layout, tree).shape) <= {1}:
            paths.add(tree.path)
    return paths
