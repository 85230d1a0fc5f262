"""What each adapter of a trainer needs: a check of the trainer's version and names, and `attach`, which gives an object a mixin."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError, MissingExtraError
from tensorstore_ck.state import register_type
from tensorstore_ck.store import Store
from tensorstore_ck.store import open as open_store

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


def opened(store: Store | str | os.PathLike[str]) -> Store:
    """The store; of a URL or path, where it is created if there is none."""
    return store if isinstance(store, Store) else open_store(store, create=True)


def all_ranks(*, also_one: bool = False) -> "dist.ProcessGroup | None":
    """The group of all ranks; None if there is one. `also_one`: a group of one rank is a group, since its parameters may be partitioned."""
    if not (dist.is_available() and dist.is_initialized()) or (dist.get_world_size() == 1 and not also_one):
        return None
    return dist.group.WORLD


def register_attributes(cls: type[Any], name: str) -> None:
    """Lets states hold objects of a class, by their attributes. As pickle does, a load does not call `__init__`."""

    def from_state(state: Any) -> Any:
        if not (isinstance(state, dict) and all(isinstance(key, str) for key in state)):
            raise CorruptObjectError(f"a stored {name} has no attributes; run `tsck fsck`", object_id=name)
        made = object.__new__(cls)
        made.__dict__.update(state)
        return made

    register_type(cls, name, lambda value: dict(vars(value)), from_state)


def attach(target: object, mixin: type, native: type, begin: Callable[[], None], *, title: str, expected: str) -> None:
    """Mixes `mixin` into the class of `target` and calls `begin`, which prepares it; if that fails, `target` is as it was.

    `title` is what messages call it, `expected` what the user should have passed. Raises `InvalidOptionError` if it saves into a store
    already, or is no object of `native`.
    """
    if isinstance(target, mixin):
        raise InvalidOptionError(f"this {title} saves into a store already", object_id=title.lower())
    if not isinstance(target, native):
        raise InvalidOptionError(f"attach {expected}, not {target!r:.200}", object_id=title.lower())
    kind = type(target)
    target.__class__ = type(kind.__name__, (mixin, kind), {})
    try:
        begin()
    except BaseException:
        target.__class__ = kind
        raise
