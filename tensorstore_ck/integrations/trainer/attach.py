"""Makes an object of a trainer save into a store: its class gets a mixin, and all that refers to the object sees the same one."""

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError
from tensorstore_ck.state import register_type
from tensorstore_ck.store import Store
from tensorstore_ck.store import open as open_store


def opened(store: Store | str | os.PathLike[str]) -> Store:
    """The store; of a URL or path, where it is created if there is none."""
    return store if isinstance(store, Store) else open_store(store, create=True)


def all_ranks(*, also_one: bool = False) -> "dist.ProcessGroup | None":
    """The group of all ranks; None if there is one. `also_one`: a group of one rank is a group, since its parameters may be partitioned."""
    if not (dist.is_available() and dist.is_initialized()) or (dist.get_world_size() == 1 and not also_one):
        return None
    return dist.group.WORLD


class NativeNames:
    """A base of mixins."""

    @property
    def _native(self) -> Any:
        """The same object; to type checkers one that may have the private names of the trainer's class."""
        return self


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
