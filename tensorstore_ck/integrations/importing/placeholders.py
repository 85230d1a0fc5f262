"""Placeholders while a pickle is read: for a global that it names (`AllowedGlobal`), or for an object; and a state that has some."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Unstorable:
    """An object that a snapshot cannot hold; `resolve_placeholders` rejects it by its path, unless it is excluded."""

    __slots__ = ("held", "name")

    def __init__(self, name: str, *held: object) -> None:
        self.name = name
        """A description, or ``module.name``, shortened and printable."""
        self.held: list[object] = list(held)
        """Its arguments and state in a pickle."""


class UnknownObject(Unstorable):
    """An object that a pickle creates in a way that is not allowed: it accepts whatever the pickle does with it."""

    __slots__ = ()


@dataclass(slots=True, eq=False, repr=False)
class AllowedGlobal:
    """An allowed name in a pickle: a function of the arguments in the pickle."""

    name: str
    make: Callable[..., Any] | None
    """Raises ValueError, TypeError or RuntimeError for wrong arguments. Its result may have a method ``build`` that takes a state."""
    value: object = None
    """Its value if it is not called."""


class Deferred:
    """An object whose content its method `build` takes after its creation; `resolve_placeholders` replaces it by its value.

    `build` raises ValueError or TypeError for unknown content.
    """

    def __init__(self) -> None:
        self.value: Any = self
        """Itself, until `build` is called."""
        self.held: list[object] = []
        """Everything in its state."""


class FoundState(NamedTuple):
    """The state of a foreign checkpoint, with placeholders."""

    format: str
    state: Any
    metadata: Mapping[str, object]
    unknown: Mapping[str, str]
    """Names in its pickles that are not allowed -> the file."""
    step: int | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    """Files next to it that are not part of it, and why."""
    files: tuple[str, ...] = ()
    """The files that its index names."""
    missing: tuple[str, ...] = ()
    """Files that belong to it, and are not there."""
