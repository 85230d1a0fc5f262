"""Removes a prefix from all names of a state: ``model.h.0.weight`` becomes ``h.0.weight``. Pure: trees in and out."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tensorstore_ck.common.units import listed
from tensorstore_ck.errors import InvalidOptionError, MismatchError
from tensorstore_ck.format.tree import Container, Leaf, Tree, leaves
from tensorstore_ck.format.values import key_text
from tensorstore_ck.state.rebuild_tree import UNSELECTED

DICTS = ("d", "o", "c", "f")
"""The tags of dicts."""


class _Entry(NamedTuple):
    key: Any
    child: Tree
    parent: Container


def without_prefix(tree: Tree, prefix: str) -> Tree:
    """`tree` with names without `prefix`, such as ``model.``. The entries of a dict whose whole name is the prefix move to the top.

    Raises `InvalidOptionError` if the prefix ends inside a name, `MismatchError` if a name lacks the prefix, or two names become equal.
    """
    if not prefix:
        return tree
    names = [leaf.path for leaf in _without_attributes(tree)]
    lacking = [name for name in names if not name.startswith(prefix)]
    if lacking:
        raise MismatchError(
            f"the prefix {prefix!r} is missing from {listed(lacking, 4)}: select the names that have it, "
            f"--include {prefix + '*'!r} (select=)",
            object_id=lacking[0],
        )
    cut = [name for name in names if name[len(prefix) : len(prefix) + 1] in ("", ".")]
    if cut:
        raise InvalidOptionError(
            f"the prefix {prefix!r} leaves {cut[0][len(prefix) :]!r} of the name {cut[0]!r}: end the "
            "prefix with the dot before what is to stay",
            object_id="strip_prefix",
        )
    entries = list(_below(tree, prefix, prefix))
    if not entries:
        raise MismatchError("nothing is left to export", object_id="strip_prefix")
    seen: dict[str, None] = {}
    for entry in entries:
        text = entry.key if type(entry.key) is str else key_text(entry.key)
        if text in seen:
            raise MismatchError(
                f"two names become {text!r} without the prefix {prefix!r}: exclude one of them with --exclude (exclude=)", object_id=text
            )
        seen[text] = None
    (first, *others) = {id(entry.parent): entry.parent for entry in entries}.values()
    is_whole = not others and list(first.keys) == [entry.key for entry in entries]  # else its attributes are of other names
    node, attributes = (first.node, first.attributes) if is_whole else (["d", [], []], None)
    for leaf in leaves(tree):
        if leaf is not UNSELECTED:
            leaf.path = leaf.path.removeprefix(prefix)
    return Container(
        node=node, path="", keys=[entry.key for entry in entries], children=[entry.child for entry in entries], attributes=attributes
    )


def _without_attributes(tree: Tree) -> Iterator[Leaf]:
    """Leaves, without those in the attributes of dicts, which no name contains."""
    if isinstance(tree, Container):
        for child in tree.children:
            yield from _without_attributes(child)
    elif tree is not UNSELECTED:
        yield tree


def _below(tree: Tree, rest: str, prefix: str) -> Iterator[_Entry]:
    """The entries of a tree, without `rest`, the remainder of the prefix at this level."""
    if not isinstance(tree, Container) or tree.node[0] not in DICTS:
        path = tree.path if isinstance(tree, Leaf) or tree.path else "the state"
        raise MismatchError(f"{path} is no dict, so its names cannot lose the prefix {prefix!r}: use a shorter prefix", object_id=path)
    for key, child in zip(tree.keys, tree.children, strict=True):
        text = key if type(key) is str else key_text(key)
        if rest.startswith(f"{text}.") and isinstance(child, Container):
            yield from _below(child, rest[len(text) + 1 :], prefix)
        elif not rest:
            yield _Entry(key, child, tree)
        else:
            yield _Entry(text.removeprefix(rest), child, tree)


def sole_prefix(tree: Tree) -> str:
    """The prefix up to the first dict of several entries, or of tensors: ``model.`` for ``{"model": {...}}``; '' if there is none."""
    prefix = ""
    while isinstance(tree, Container) and tree.node[0] in DICTS and len(tree.children) == 1:
        (child,) = tree.children
        if not isinstance(child, Container) or child.node[0] not in DICTS:
            break
        (key,) = tree.keys
        prefix += f"{key if type(key) is str else key_text(key)}."
        tree = child
    return prefix
