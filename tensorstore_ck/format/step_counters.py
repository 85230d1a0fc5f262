"""Finds the step counters of optimizers in a layout: Adam's ``state.<parameter>.step``, FusedAdam's ``param_groups.<n>.step``.

Pure and free of torch. It recognises the ``state_dict`` of every ``torch.optim`` optimizer: a dict with ``state`` or ``param_groups``,
which hold a dict per parameter or group.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from tensorstore_ck.format.layout import Layout, Node

_GROUPS: Final = ("state", "param_groups")
_DICTS: Final = ("d", "o", "f", "c")


class StepCounter(NamedTuple):
    """One counter."""

    optimizer: str
    """The path of its optimizer's state; empty if that is the whole state."""
    kind: Literal["tensor", "value"]
    number: int
    """The tensor's number, or the value's."""


@dataclass(slots=True)
class StepCounters:
    """The counters of one layout."""

    found: list[StepCounter] = field(default_factory=list)
    may_skip: bool = False
    """Whether the state has a gradient scaler, which lets optimizers skip steps."""


def find_counters(layout: Layout) -> StepCounters:
    """Searches the tree of a layout."""
    counters = StepCounters()
    _CounterSearch(layout, counters).visit(layout.tree, "", "", 0)
    return counters


class _CounterSearch:
    def __init__(self, layout: Layout, counters: StepCounters) -> None:
        self._tensors = layout.tensors[:]
        self._counters = counters
        self._holes = 0

    def visit(self, node: Node, path: str, optimizer: str, level: int) -> None:
        """`level`: 1 for the container of the dicts per parameter or group of `optimizer`, 2 for such a dict; else 0."""
        if type(node) is not list:
            self._holes += node is None
            return
        tag, attributes = node[0], None
        keys: Iterable[Any]
        if tag in _DICTS:
            keys, nodes = node[-2:] if tag == "f" else node[1:3]
            self._counters.may_skip |= "_growth_tracker" in keys
            if tag == "o" and node[3] is not False:
                attributes = [node[3]]
        elif tag in ("l", "u"):
            keys, nodes = range(len(node[1])), node[1]
        elif tag == "n":
            keys, nodes, optimizer, level = node[2], node[3], "", 0
        else:
            keys, nodes, level = (), (), 0
            attributes = [node[2]] if tag == "r" else None
        if level != 2 and list not in map(type, nodes):
            self._holes += nodes.count(None)
            keys = nodes = ()
        for key, child in zip(keys, nodes, strict=True):
            if level == 2 and key == "step":
                self._note(child, optimizer)
            if type(child) is not list:
                self._holes += child is None
            elif level:
                self.visit(child, path, optimizer, 2 if level == 1 else 0)
            elif type(key) is str and key in _GROUPS:
                self.visit(child, path, path, 1)
            else:
                self.visit(child, f"{path}.{key}" if path else f"{key}", "", 0)
        for child in attributes or ():
            self.visit(child, path, "", 0)

    def _note(self, node: Node, optimizer: str) -> None:
        if node is None:
            self._counters.found.append(StepCounter(optimizer, "value", self._holes))
            return
        number = node if type(node) is int else node[1] if node[0] == "t" else None
        if number is not None and set(self._tensors[number].shape) <= {1}:
            self._counters.found.append(StepCounter(optimizer, "tensor", number))
