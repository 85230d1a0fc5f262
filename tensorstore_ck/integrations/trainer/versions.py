"""Which versions of a package an adapter supports, and whether the names that it uses are as they were: if not, a `MissingExtraError`."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tensorstore_ck.errors import MissingExtraError

Parameters = tuple[str, ...]
Version = tuple[int, int]


class Package(NamedTuple):
    """A package that an adapter uses."""

    title: str
    """For messages."""
    name: str
    """The name for pip, with extras."""
    lowest: Version
    above: Version
    """The first version that is not supported."""
    tested: str = ""
    """The requirement for pip of the version with which the adapter was tested."""

    @property
    def requirement(self) -> str:
        """The requirement for pip of a supported version."""
        (major, minor), (above, above_minor) = self.lowest, self.above
        return f"{self.name}>={major}.{minor},<{above}" + (f".{above_minor}" if above_minor else "")

    def require_version(self, installed: str) -> None:
        """Checks the installed version. Raises `MissingExtraError` if it is not supported."""
        if not self.lowest <= numbers_of(installed) < self.above:
            raise MissingExtraError(
                f"{self.title} {installed} is not supported: run `pip install '{self.requirement}'`", object_id=self.name.partition("[")[0]
            )

    def require_unchanged(self, installed: str, changed: Iterable[str], *, owner: str = "", module: str = "") -> None:
        """Raises `MissingExtraError` if a name has `changed`.

        `owner`, such as "the Trainer of", names in the message what has the names; the `object_id` is the name behind `module`.
        """
        name = next(iter(changed), None)
        if name is not None:
            raise MissingExtraError(
                f"{owner}{' ' if owner else ''}{self.title} {installed} has another {name} than the one that is used here: run "
                f"`pip install '{self.tested}'`, with which this was tested",
                object_id=f"{module}.{name}" if module else name,
            )


def numbers_of(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])


def changed_methods(owner: object, methods: Mapping[str, Parameters]) -> Iterator[str]:
    """The methods that `owner` lacks, or that have other parameters. `methods`: name -> parameters; a name may have dots."""
    for name, parameters in methods.items():
        method = _attribute(owner, name)
        if method is None or tuple(inspect.signature(method).parameters) != parameters:
            yield name


def changed_overrides(owner: object, mixin: type, names: Iterable[str]) -> Iterator[str]:
    """The methods that `owner` lacks, or that have other parameters than those of `mixin`, which override them."""
    return changed_methods(owner, {name: tuple(inspect.signature(getattr(mixin, name)).parameters) for name in names})


def changed_functions(functions: Iterable[tuple[Callable[..., Any], Parameters]]) -> Iterator[str]:
    """The names of functions and classes that have other parameters."""
    return (function.__qualname__ for function, parameters in functions if tuple(inspect.signature(function).parameters) != parameters)


def missing_attributes(owner: object, paths: Iterable[str]) -> Iterator[str]:
    """The attributes, or attributes of attributes, that `owner` lacks."""
    return (path for path in paths if _attribute(owner, path, _MISSING) is _MISSING)


_MISSING = object()


def _attribute(owner: object, path: str, default: object = None) -> Any:
    value: Any = owner
    for name in path.split("."):
        value = getattr(value, name, _MISSING)
        if value is _MISSING:
            return default
    return value
