"""What users call that is not decorated with `short_errors`."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from types import FunctionType
from typing import Any

import tensorstore_ck as tsck
from tensorstore_ck.common.user_frames import short_errors

SHORT = short_errors(lambda: None).__code__
RAISE_NOTHING = frozenset({"LoadReport.deliver", "RunOutcome.of", "Snapshot.cells", "Snapshot.from_info"})


def long_errors(public: Iterable[object]) -> list[str]:
    """Names of functions among `public`, and of public methods of its classes, whose errors have frames of this package."""
    found = []
    for each in public:
        if isinstance(each, FunctionType) and not _is_short(each):
            found.append(each.__name__)
        if isinstance(each, type) and not issubclass(each, BaseException):
            methods = {name: getattr(value, "__func__", value) for name, value in vars(each).items() if not name.startswith("_")}
            found += [
                f"{each.__name__}.{name}" for name, value in methods.items() if isinstance(value, FunctionType) and not _is_short(value)
            ]
    return sorted({*found} - RAISE_NOTHING)


def long_errors_of_adapter(name: str) -> list[str]:
    """Those of `tensorstore_ck.integrations`. Each test of a trainer's environment calls it for its own adapter."""
    adapter = import_module(f"tensorstore_ck.integrations.{name}")
    public = [getattr(adapter, each) for each in vars(adapter).get("__all__", ("log_snapshot", "find_snapshot"))]
    assert public
    return long_errors(public)


def frames_of_package(error: BaseException) -> list[str]:
    """The functions of the package in an error's traceback: none, in a short one."""
    package = Path(tsck.__file__).parent
    return [frame.name for frame in extract_tb(error.__traceback__) if package in Path(frame.filename).parents]


def _is_short(function: Any) -> bool:
    return any(each.__code__ is SHORT for each in _unwrapped(function))


def _unwrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)
