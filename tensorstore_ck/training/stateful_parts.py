"""The arguments of `TrainingState`: one object, or several in a dict or list; each with `state_dict` and `load_state_dict`.

Does not know the objects' types. Any exception from a user's object while it loads its state becomes an error that names the object.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from tensorstore_ck.errors import InvalidOptionError, MismatchError, StoreError

VALUES: Final = ("extra", "rank_values")
"""Arguments that may have plain values."""
Get = Callable[[str, Any], Any]
"""(path, object) -> the object's state."""


class StatefulPart(NamedTuple):
    """An argument of `TrainingState`."""

    name: str
    objects: dict[str, Any]
    """Name -> object; a single object has the name ''."""

    @classmethod
    def of(cls, name: str, given: object) -> "StatefulPart":
        """Parses an argument. Raises `InvalidOptionError` if a key is no string, or has a dot."""
        if given is None:
            return cls(name, {})
        if isinstance(given, Mapping):
            objects: dict[str, Any] = dict(given)
        elif isinstance(given, list | tuple):
            objects = {str(number): value for number, value in enumerate(given)}
        else:
            objects = {"": given}
        if not all(isinstance(key, str) and (key or objects.keys() == {""}) for key in objects):
            raise InvalidOptionError(f"{name}= must have strings as keys, not {list(objects)!r:.200}", object_id=name)
        if name not in VALUES and any("." in key for key in objects):  # parameter names begin with it, and must stay unambiguous
            raise InvalidOptionError(f"{name}= must have keys without dots, not {list(objects)!r:.200}", object_id=name)
        return cls(name, objects)

    def require(self, fits: Callable[[Any], bool], what: str) -> "StatefulPart":
        """Checks each object. Raises `InvalidOptionError` if one is not `what`, or is there twice."""
        if len({id(value) for value in self.objects.values()}) < len(self.objects):
            raise InvalidOptionError(f"{self.name}= has an object twice: name each once", object_id=self.name)
        for key, value in self.objects.items():
            if not fits(value):
                kind = type(value)
                raise InvalidOptionError(
                    f"{self.path(key)} must be {what}, not a {kind.__module__}.{kind.__qualname__}", object_id=self.path(key)
                )
        return self

    def matching(self, fits: Callable[[Any], bool]) -> "StatefulPart":
        """The part with only those objects that fit."""
        return StatefulPart(self.name, {key: value for key, value in self.objects.items() if fits(value)})

    def only(self, parts: Collection[str]) -> "StatefulPart":
        """The part, or one without objects if its name is not in `parts`."""
        return self if self.name in parts else StatefulPart(self.name, {})

    def path(self, key: str) -> str:
        """The path of an object's state in the whole state."""
        return f"{self.name}.{key}" if key else self.name

    def states(self, get: Get) -> dict[str, Any]:
        """The entry of this part in a state: nothing, one state, or a dict of states."""
        if not self.objects:
            return {}
        states = {key: get(self.path(key), value) for key, value in self.objects.items()}
        return {self.name: states.get("", states)}

    def with_states(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        """(path, object, its stored state) of each. Raises `MismatchError` if an object has no state, or a state has no object."""
        stored = state.get(self.name)
        if "" in self.objects or not self.objects:
            states = {} if stored is None else {"": stored}
        else:
            states = dict(stored) if isinstance(stored, Mapping) else {}
        is_value = self.name in VALUES  # None is a valid value
        missing = [self.path(key) for key in self.objects if key not in states or (states[key] is None and not is_value)]
        if missing:
            raise MismatchError(f"the snapshot has no state of {', '.join(missing)}: it was saved without", object_id=missing[0])
        unexpected = [self.path(key) for key in states if key not in self.objects]
        if unexpected:
            raise MismatchError(
                f"the snapshot has states of {', '.join(unexpected)}, which this TrainingState lacks: pass those objects",
                object_id=unexpected[0],
            )
        return ((self.path(key), value, states[key]) for key, value in self.objects.items())


def is_stateful(candidate: object) -> bool:
    """Whether it has `state_dict` and `load_state_dict`."""
    return callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None))


def load(path: str, take: Callable[[Any], object], state: object) -> None:
    """Loads an object's state. Raises `MismatchError` if the object raised something."""
    try:
        take(state)
    except StoreError:
        raise
    except Exception as exc:
        raise MismatchError(
            f"{path} does not take its state from the snapshot: {type(exc).__name__}: {exc}. Was it created like the saved one?",
            object_id=path,
        ) from exc
