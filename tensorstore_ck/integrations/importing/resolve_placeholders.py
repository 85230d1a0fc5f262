"""Resolves placeholders, drops excluded paths, rejects unsupported objects.

Also limits the nesting of a state, and its number of items when shared ones count each time, so that a small file cannot expand to an
endless state.
"""

import fnmatch
import glob
import re
import shlex
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch

from tensorstore_ck.errors import MismatchError, UnsupportedValueError
from tensorstore_ck.format.tree import MAX_PATH
from tensorstore_ck.format.values import MAX_NESTING
from tensorstore_ck.integrations.importing.malformed import printable
from tensorstore_ck.integrations.importing.pickle_allowlist import Stored
from tensorstore_ck.integrations.importing.placeholders import AllowedGlobal, Deferred, UnknownObject, Unstorable
from tensorstore_ck.state.registered_types import NamedState

FREE_ITEMS: Final = 1 << 17
"""Allowed items for pickles of any length."""
ITEMS_PER_BYTE: Final = 16
"""Additional items per byte of the pickles; a shared list counts each time."""
BYTES_PER_ITEM: Final = 16
"""Text and bytes count as one more item for each 16 bytes."""

_MAPPINGS: Final = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES: Final = (list, tuple)
_GONE: Final = object()
_ALL: Final = "all of it"
_NO_FORM: Final = "values that a snapshot cannot hold"


def resolve_placeholders(
    state: Any, exclude: Sequence[str], unknown: Mapping[str, str], origin: str, parsed_bytes: int, *, dropped: Sequence[object] = ()
) -> tuple[Any, list[str]]:
    """The final state, and the paths that were excluded from it.

    Args:
        state: As read, with placeholders.
        exclude: Globs over paths, as in `select`.
        unknown: Names in pickles that are not allowed -> the file. Each must occur in the state, for a message with its path.
        origin: The name of the checkpoint in messages.
        parsed_bytes: The size of its pickles and headers.
        dropped: Names in objects that were left out while the pickles were read.

    Raises:
        UnsupportedValueError: it holds objects that only their own code could create, or is nested too deep or too large.
        MismatchError: a glob matches nothing.
    """
    resolver = _Resolver(exclude, origin)
    resolver.bound(state, parsed_bytes)
    resolved = resolver.visit(state, "")
    resolver.note_names(*dropped)
    resolver.raise_on_leftovers(unknown)
    return resolved, resolver.left_out


class _Resolver:
    def __init__(self, exclude: Sequence[str], origin: str) -> None:
        self.left_out: list[str] = []
        self._origin = origin
        self._patterns = {text: re.compile(f"{fnmatch.translate(text)}|{fnmatch.translate(text + '.*')}") for text in exclude}
        self._unused = set(self._patterns)
        self._refused: dict[str, list[str]] = {}
        self._needs_code = False
        self._seen: set[str] = set()
        self._noted: set[int] = set()

    def raise_on_leftovers(self, unknown: Mapping[str, str]) -> None:
        if self._unused:
            first = min(self._unused)
            raise MismatchError(f"nothing in {self._origin} matches {first!r}, which is to be excluded", object_id=first)
        for name, path in unknown.items():
            if name not in self._seen:
                raise UnsupportedValueError(
                    f"{path} uses {name} in a way that leaves no trace in its content: no checkpoint needs that, so do not trust it",
                    object_id=path,
                )
        if self._refused:
            self._refuse()

    def _refuse(self) -> None:
        shown = "; ".join(
            f"{', '.join(paths[:3])}{' ...' if len(paths) > 3 else ''} ({name})" for name, paths in list(self._refused.items())[:4]
        )
        more = len(self._refused) - 4
        first = next(iter(self._refused.values()))[0]
        why = "objects that only their own code could create, and nothing in a checkpoint is ever run" if self._needs_code else _NO_FORM
        quoted = shlex.quote(glob.escape(first)) if "'" in first else f"'{glob.escape(first)}'"
        exclude = f"exclude them (--exclude {quoted}), or " if first != _ALL else ""
        advice = "save plain values" if exclude else "save plain values, such as the state_dict() of a module"
        raise UnsupportedValueError(
            f"{self._origin} holds {why}: {shown}{f' and {more} more kinds' if more > 0 else ''}; {exclude}load it where you trust it and "
            f"{advice}",
            object_id=first,
        )

    def bound(self, state: Any, parsed_bytes: int) -> None:
        """Limits items and levels; visits every object once."""
        known: dict[int, tuple[int, int]] = {}
        begun: set[int] = set()

        def measure(value: Any, depth: int) -> tuple[int, int]:
            value = finished(value)
            if type(value) not in _CONTAINERS:
                return 1 + (len(value) // BYTES_PER_ITEM if type(value) in _BYTES else len(value) if type(value) in _SETS else 0), 0
            key = id(value)
            if key not in known:
                if key in begun or depth > MAX_NESTING:
                    self._too_deep()
                begun.add(key)
                count, height = 1, 0
                attributes = vars(value).get("_metadata") if type(value) is OrderedDict else None
                for item in chain(_items(value), () if attributes is None else (attributes,)):
                    below = measure(item, depth + 1)
                    count, height = count + below[0], max(height, below[1])
                known[key] = count, height + 1
            if depth + known[key][1] > MAX_NESTING:
                self._too_deep()
            return known[key]

        items, _ = measure(state, 0)
        if items > FREE_ITEMS + ITEMS_PER_BYTE * parsed_bytes:
            raise UnsupportedValueError(
                f"{self._origin} expands to {items:,} values, and the {parsed_bytes:,} bytes of its pickles are too few for these: it was "
                "made to exhaust memory, so do not trust it",
                object_id=self._origin,
            )

    def _too_deep(self) -> None:
        raise UnsupportedValueError(
            f"{self._origin} is nested deeper than {MAX_NESTING} levels, or contains itself: flatten it where it is created",
            object_id=self._origin,
        )

    def visit(self, value: Any, path: str) -> Any:
        if self._patterns and path and self._is_left_out(path, value):
            return _GONE
        kind, path = type(value), path[:MAX_PATH]
        if kind in _MAPPINGS:
            return self._visit_mapping(value, path)
        if kind in _SEQUENCES:
            items = [self.visit(item, f"{path}.{number}" if path else str(number)) for number, item in enumerate(value)]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return kind(None if item is _GONE else item for item in items)
        if isinstance(value, Deferred):
            self.note_names(value)
            made = finished(value)
            return self._note(value, "an unfinished object", path) if isinstance(made, Deferred) else self.visit(made, path)
        if kind is NamedState:
            state = self.visit(value.state, path)
            return value if state is value.state else NamedState(value.name, state)
        if isinstance(value, Unstorable):
            self._needs_code = self._needs_code or isinstance(value, UnknownObject)
            return self._note(value, value.name, path)
        if isinstance(value, AllowedGlobal):
            return self._note(value, f"the function {value.name}", path)
        if isinstance(value, Stored):
            return self._note(value, "a bare storage", path)
        if isinstance(value, type | torch.layout):
            return self._note(value, _class_or_layout(value), path)
        if kind in (set, frozenset) and (hidden := _placeholder_in(value)) is not None:
            self._needs_code = True
            return self._note(value, hidden, path)
        return value

    def _visit_mapping(self, value: Any, path: str) -> Any:
        items = {}
        changed = False
        for key, item in value.items():
            hidden = _placeholder_in(key)
            name = hidden or (printable(key) if type(key) in (str, int, float, bool) else type(key).__name__)
            below = f"{path}.{name}" if path else name
            if hidden is not None:
                changed = True
                if not self._is_left_out(below, key, item):
                    self._needs_code = True
                    self._note(item, f"{hidden}, as a key", below)
                    self.note_names(key)
                continue
            new = self.visit(item, below)
            changed = changed or new is not item
            if new is not _GONE:
                items[key] = new
        if type(value) is OrderedDict and "_metadata" in vars(value):
            attributes = self.visit(vars(value)["_metadata"], f"{path}._metadata" if path else "_metadata")
            changed = changed or attributes is not vars(value)["_metadata"]
        if not changed:
            return value
        made: Any = defaultdict(value.default_factory, items) if type(value) is defaultdict else type(value)(items)
        if type(value) is OrderedDict and "_metadata" in vars(value) and attributes is not _GONE:
            vars(made)["_metadata"] = attributes
        return made

    def _note(self, value: object, name: str, path: str) -> object:
        self.note_names(value)
        self._refused.setdefault(name, []).append(path or _ALL)
        return value

    def _is_left_out(self, path: str, *values: Any) -> bool:
        fitting = [text for text, pattern in self._patterns.items() if pattern.match(path)]
        if fitting:
            self._unused.difference_update(fitting)
            self.left_out.append(path)
            self.note_names(*values)
        return bool(fitting)

    def note_names(self, *values: Any) -> None:
        """Records the names of all placeholders in values of the state, which it knows by their ids, and in their contents."""
        pending = list(values)
        while pending:
            item = pending.pop()
            if id(item) in self._noted:
                continue
            if isinstance(item, UnknownObject):
                self._seen.add(item.name)
            if isinstance(item, Unstorable | Deferred):
                self._noted.add(id(item))
                pending.extend(item.held)
            elif type(item) in _CONTAINERS or type(item) in (set, frozenset):
                self._noted.add(id(item))
                pending.extend(item if isinstance(item, dict) else ())
                pending.extend(_items(item))


_CONTAINERS: Final = frozenset({*_MAPPINGS, *_SEQUENCES, NamedState})
_BYTES: Final = frozenset({str, bytes, bytearray})
_SETS: Final = frozenset({set, frozenset})


def _placeholder_in(value: Any) -> str | None:
    """The name of a placeholder that is a dict's key or in one, or in a set."""
    if isinstance(value, tuple | set | frozenset):
        return next((name for item in value if (name := _placeholder_in(item)) is not None), None)
    if isinstance(value, Unstorable | AllowedGlobal):
        return value.name
    if isinstance(value, type | torch.layout):
        return _class_or_layout(value)
    return type(value).__name__ if isinstance(value, Stored | Deferred | torch.Tensor) else None


def _class_or_layout(value: "type[Any] | torch.layout") -> str:
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else str(value)


def _items(container: Any) -> Iterable[Any]:
    if type(container) is NamedState:
        return (container.state,)
    items: Iterable[Any] = container.values() if isinstance(container, dict) else container
    return items


def finished(value: Any) -> Any:
    """The value of a `Deferred`; itself, if it has none."""
    for _ in range(MAX_NESTING):
        if not isinstance(value, Deferred):
            break
        value = value.value
    return value
