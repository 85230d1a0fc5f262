"""Goes over what was read before it is taken apart: puts made things in their places, leaves out what is to be left out, refuses the rest.

Bounds what a state may ask of those who walk it: how deep it is nested, and how many items it has when everything that it refers to
twice is counted twice, so that a small file cannot stand for an endless state.
"""

import fnmatch
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tensorstore_ck.errors import MismatchError, UnsupportedValueError
from tensorstore_ck.format.values import MAX_NESTING
from tensorstore_ck.integrations.importing.malformed import printable
from tensorstore_ck.integrations.importing.pickle_allowlist import Stored
from tensorstore_ck.integrations.importing.placeholders import AllowedGlobal, Deferred, UnknownObject

FREE_ITEMS: Final = 1 << 17
"""What a state may have, however short its pickles are."""
ITEMS_PER_BYTE: Final = 16
"""What each of their bytes adds to that: a list that several things share is counted for each of them."""
BYTES_PER_ITEM: Final = 16
"""Text and bytes count as so many items more."""

_MAPPINGS: Final = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES: Final = (list, tuple)
_GONE: Final = object()


class ResolvedState(NamedTuple):
    """A state that holds only what can be told by its type."""

    state: Any
    left_out: list[str]
    """Paths."""


def settle(state: Any, exclude: Sequence[str], unknown: Mapping[str, str], origin: str, parsed_bytes: int) -> ResolvedState:
    """The state, without what is to be left out.

    Args:
        state: What was read.
        exclude: Globs over paths, as `select` has them.
        unknown: Names in pickles that nobody knows -> the file. Each must be in the state, where its path tells what it is.
        origin: What messages call the whole.
        parsed_bytes: What its pickles and headers take.

    Raises:
        UnsupportedValueError: it holds things that would have to be run to be made, or is nested too deep, or endless.
        MismatchError: a glob fits nothing.
    """
    walk = _Resolver(exclude, origin)
    walk.bound(state, parsed_bytes)
    settled = walk.visit(state, "")
    walk.require_all_told(unknown)
    return ResolvedState(settled, walk.left_out)


class _Resolver:
    def __init__(self, exclude: Sequence[str], origin: str) -> None:
        self.left_out: list[str] = []
        self._origin = origin
        self._patterns = {glob: re.compile(f"{fnmatch.translate(glob)}|{fnmatch.translate(glob + '.*')}") for glob in exclude}
        self._unused = set(self._patterns)
        self._refused: dict[str, list[str]] = {}
        self._seen: set[str] = set()
        self._told: set[int] = set()

    def require_all_told(self, unknown: Mapping[str, str]) -> None:
        """Refuses what is not to be stored, now that all of it is known."""
        if self._unused:
            glob = min(self._unused)
            raise MismatchError(f"nothing in {self._origin} fits {glob!r}, which was to be left out", object_id=glob)
        for name, path in unknown.items():
            if name not in self._seen:
                raise UnsupportedValueError(
                    f"{path} uses {name} in a way that leaves no trace in what it holds: no checkpoint needs that, so do not trust it",
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
        raise UnsupportedValueError(
            f"{self._origin} holds objects that only their own code could make, and nothing in a checkpoint is ever run: {shown}"
            f"{f' and {more} more kinds' if more > 0 else ''}; leave them out (--exclude '{first}'), or load it where you trust it "
            "and save plain values",
            object_id=first,
        )

    def bound(self, state: Any, parsed_bytes: int) -> None:
        """Counts items, and levels, without walking anything twice."""
        known: dict[int, tuple[int, int]] = {}
        begun: set[int] = set()

        def measure(value: Any, depth: int) -> tuple[int, int]:
            value = _finished(value)
            if type(value) not in _CONTAINERS:
                return 1 + (len(value) // BYTES_PER_ITEM if type(value) in _BYTES else len(value) if type(value) in _SETS else 0), 0
            key = id(value)
            if key not in known:
                if key in begun or depth > MAX_NESTING:
                    self._too_deep()
                begun.add(key)
                count, height = 1, 0
                for item in value.values() if isinstance(value, dict) else value:
                    below = measure(item, depth + 1)
                    count, height = count + below[0], max(height, below[1])
                attributes = vars(value).get("_metadata") if type(value) is OrderedDict else None
                if attributes is not None:
                    below = measure(attributes, depth + 1)
                    count, height = count + below[0], max(height, below[1])
                known[key] = count, height + 1
            if depth + known[key][1] > MAX_NESTING:
                self._too_deep()
            return known[key]

        items, _ = measure(state, 0)
        if items > FREE_ITEMS + ITEMS_PER_BYTE * parsed_bytes:
            raise UnsupportedValueError(
                f"{self._origin} stands for {items:,} values, and the {parsed_bytes:,} bytes of its pickles are too few for these: it was "
                "made to exhaust memory, so do not trust it",
                object_id=self._origin,
            )

    def _too_deep(self) -> None:
        raise UnsupportedValueError(
            f"{self._origin} is nested deeper than {MAX_NESTING} levels, or holds itself: flatten it where it is made",
            object_id=self._origin,
        )

    def visit(self, value: Any, path: str) -> Any:
        if self._patterns and path and self._is_left_out(path, value):
            return _GONE
        kind = type(value)
        if kind in _MAPPINGS:
            return self._visit_mapping(value, path)
        if kind in _SEQUENCES:
            items = [self.visit(item, f"{path}.{number}" if path else str(number)) for number, item in enumerate(value)]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return kind(None if item is _GONE else item for item in items)
        if isinstance(value, Deferred):
            self._tell(value)
            finished = _finished(value)
            return self._note(value, "an unfinished object", path) if isinstance(finished, Deferred) else self.visit(finished, path)
        if isinstance(value, UnknownObject):
            return self._note(value, value.name, path)
        if isinstance(value, AllowedGlobal):
            return self._note(value, f"the function {value.name}", path)
        if isinstance(value, Stored):
            return self._note(value, "a bare storage", path)
        if kind in (set, frozenset) and any(isinstance(item, UnknownObject) for item in value):
            return self._note(value, next(item.name for item in value if isinstance(item, UnknownObject)), path)
        return value

    def _visit_mapping(self, value: Any, path: str) -> Any:
        items = {}
        changed = False
        for key, item in value.items():
            name = printable(key) if type(key) in (str, int, float, bool) else type(key).__name__
            below = f"{path}.{name}" if path else name
            if isinstance(key, UnknownObject | Stored | Deferred | AllowedGlobal):
                self._note(key, key.name if isinstance(key, UnknownObject) else type(key).__name__, below)
                continue
            new = self.visit(item, below)
            changed = changed or new is not item
            if new is not _GONE:
                items[key] = new
        if type(value) is OrderedDict and "_metadata" in vars(value):
            attributes = self.visit(vars(value)["_metadata"], f"{path}._metadata" if path else "_metadata")
            if attributes is not vars(value)["_metadata"]:
                changed = True
        if not changed:
            return value
        made: Any = defaultdict(value.default_factory, items) if type(value) is defaultdict else type(value)(items)
        if type(value) is OrderedDict and "_metadata" in vars(value) and attributes is not _GONE:
            vars(made)["_metadata"] = attributes
        return made

    def _note(self, value: object, name: str, path: str) -> object:
        self._tell(value)
        self._refused.setdefault(name, []).append(path or "all of it")
        return value

    def _is_left_out(self, path: str, value: Any) -> bool:
        fitting = [glob for glob, pattern in self._patterns.items() if pattern.match(path)]
        if fitting:
            self._unused.difference_update(fitting)
            self.left_out.append(path)
            self._tell(value)
        return bool(fitting)

    def _tell(self, value: Any) -> None:
        """Notes the names of all stand-ins in a value, and of what they were given."""
        pending = [value]
        while pending:
            item = pending.pop()
            if id(item) in self._told:
                continue
            if isinstance(item, UnknownObject):
                self._seen.add(item.name)
            if isinstance(item, UnknownObject | Deferred):
                self._told.add(id(item))
                pending.extend(item.held)
            elif type(item) in _CONTAINERS or type(item) in (set, frozenset):
                self._told.add(id(item))
                pending.extend(item)
                if isinstance(item, dict):
                    pending.extend(item.values())


_CONTAINERS: Final = frozenset({*_MAPPINGS, *_SEQUENCES})
_BYTES: Final = frozenset({str, bytes, bytearray})
_SETS: Final = frozenset({set, frozenset})


def _finished(value: Any) -> Any:
    """What `value` stands for; itself, if that was never said."""
    for _ in range(MAX_NESTING):
        if not isinstance(value, Deferred):
            break
        value = value.value
    return value
