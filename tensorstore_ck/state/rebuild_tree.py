"""Rebuilds containers and values from a parsed tree. Imports and calls nothing that stored data names (see `registered_types`)."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.hash_probes import FEW_KEYS, reject_slow_keys
from tensorstore_ck.format.tree import Container, Leaf, Tree
from tensorstore_ck.format.values import PLAIN_TYPES, decode
from tensorstore_ck.state.registered_types import FACTORIES, decode_torch, namedtuple_class, registered_name

UNSELECTED: Final = Leaf("", "value", -1, None)
"""An element of a list or tuple that was not selected; it is rebuilt as None."""


def build(tree: Tree, content: SnapshotContent, tensor_of: Callable[[Leaf], Any]) -> Any:
    """The state that `tree` describes; `tensor_of` gives its tensors."""
    if isinstance(tree, Container):
        return _build_container(tree, [build(child, content, tensor_of) for child in tree.children], content, tensor_of)
    if tree.kind != "value":
        return tensor_of(tree)
    if tree is UNSELECTED:
        return None
    encoded = content.values[tree.index]
    return encoded if type(encoded) in PLAIN_TYPES else decode(encoded, decode_other=decode_torch, blob=content.blob, name=tree.path)


def replaced(target: object, restored: Any) -> Any:
    """`target` with the items of `restored`, if both are dicts or both are lists; else `restored`."""
    if isinstance(target, dict) and isinstance(restored, dict):
        target.clear()
        for key, item in restored.items():  # Counter.update would add
            target[key] = item
        if isinstance(target, OrderedDict) and isinstance(restored, OrderedDict):
            vars(target).update(vars(restored))
        return target
    if isinstance(target, list) and isinstance(restored, list):
        target[:] = restored
        return target
    return restored


def require_buildable(tree: Tree, content: SnapshotContent, dtype: torch.dtype | None = None) -> dict[Leaf, torch.dtype | None]:
    """Checks that every type and value in the tree can be rebuilt, before tensors are read.

    Returns the tensors of the tree, each with the dtype to convert it to: `dtype`, or None within a wrapper subclass.

    Raises:
        UnsupportedValueError: a type is not loaded or not registered in this process.
        MismatchError: the ranks saved different values of a leaf.
    """
    wanted: dict[Leaf, torch.dtype | None] = {}
    _check([tree], content.values, dtype, wanted)
    return wanted


def _check(trees: Iterable[Tree], values: Sequence[Any], dtype: torch.dtype | None, wanted: dict[Leaf, torch.dtype | None]) -> None:
    for tree in trees:
        if isinstance(tree, Leaf):
            if tree.kind != "value":
                wanted[tree] = dtype
            elif tree is not UNSELECTED:
                values[tree.index]
            continue
        tag, inner_dtype = tree.node[0], dtype
        if tag == "n":
            namedtuple_class(tree.node[1], list(tree.keys))
        elif tag == "r" and registered_name(tree.node[1]).wraps:
            inner_dtype = None
        children = tree.children if tree.attributes is None else (*tree.children, tree.attributes)
        _check(children, values, inner_dtype, wanted)


def _build_container(container: Container, items: list[Any], content: SnapshotContent, tensor_of: Callable[[Leaf], Any]) -> Any:
    tag = container.node[0]
    if tag == "l":
        return items
    if tag == "u":
        return tuple(items)
    if tag == "n":
        return tuple.__new__(namedtuple_class(container.node[1], list(container.keys)), items)
    if tag == "r":
        return registered_name(container.node[1]).from_state(items[0])
    made: dict[Any, Any]
    if tag == "d":
        made = {}
    elif tag == "o":
        made = OrderedDict()
        if container.attributes is not None:
            made._metadata = build(container.attributes, content, tensor_of)  # type: ignore[attr-defined]
    elif tag == "c":
        made = Counter()
    else:
        factory = container.node[1]
        if factory is not None and factory not in FACTORIES:
            path = container.path
            raise CorruptObjectError(f"{path!r} is a defaultdict of {factory!r}, which is not in the format", object_id=path)
        made = defaultdict(None if factory is None else FACTORIES[factory])
    where = container.path or "the state"
    try:
        name = f"a key of {where!r}"
        keys = [key if type(key) is str else decode(key, decode_other=decode_torch, name=name) for key in container.keys]
        if len(keys) > FEW_KEYS:
            reject_slow_keys(keys, is_set=False)
        for key, item in zip(keys, items, strict=True):
            made[key] = item
    except (TypeError, ValueError) as exc:
        raise CorruptObjectError(f"{where!r} has a key that cannot be one ({exc}); run `tsck fsck`", object_id=where) from exc
    if len(made) != len(items):
        raise CorruptObjectError(f"{where!r} has a key twice; run `tsck fsck`", object_id=where)
    return made
