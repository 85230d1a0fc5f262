"""What stands for an object while a pickle is read: its class in a pickle's words (`AllowedGlobal`), or the object itself."""

from collections.abc import Callable
from typing import Any


class UnknownObject:
    """Something that a pickle wants made, and nobody here makes."""

    __slots__ = ("held", "name")

    def __init__(self, name: str, *held: object) -> None:
        self.name = name
        """``module.name``, shortened and printable."""
        self.held: list[object] = list(held)
        """What the pickle gave it."""


class AllowedGlobal:
    """What a name in a pickle stands for: a function of the arguments that the pickle gives it."""

    __slots__ = ("make", "name", "value")

    def __init__(self, name: str, make: Callable[..., Any] | None, value: object = None) -> None:
        """`make` raises ValueError, TypeError or RuntimeError for what it does not take. `value`: what it is when it is not called.

        What it makes may have a method ``build`` that takes a state.
        """
        self.name = name
        self.make = make
        self.value = value


class Deferred:
    """An object whose contents come after it was made: `settle` puts its value in its place."""

    def __init__(self) -> None:
        self.value: Any = self
        """Itself, until it has one."""
        self.held: list[object] = []
        """What else the pickle gave it."""

    def build(self, state: Any) -> None:
        """Takes the contents; raises ValueError or TypeError for those that it does not know."""
        raise NotImplementedError
