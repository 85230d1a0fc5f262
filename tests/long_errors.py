"""What users call that is not decorated with `short_errors`."""

from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

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


def _is_short(function: Any) -> bool:
    return any(each.__code__ is SHORT for each in _unwrapped(function))


def _unwrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)
