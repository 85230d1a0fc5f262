"""Errors and warnings as a user's script sees them: errors without frames of this package, warnings at the user's line.

With the logger ``tensorstore_ck`` at debug level all frames stay.
"""

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from types import FrameType, FunctionType, GeneratorType, TracebackType
from typing import Any, Final, TypeVar

from tensorstore_ck.common.printed_commands import name_store
from tensorstore_ck.errors import StoreError

Target = TypeVar("Target", bound=Callable[..., Any])
Prepare = Callable[[StoreError, Sequence[Any]], object]
"""What is done to an error that leaves a call, by the arguments of the call."""
_logger: Final = logging.getLogger("tensorstore_ck")
_PACKAGE: Final = __name__.partition(".")[0]
_LIBRARY: Final = os.path.join(os.path.dirname(os.__file__), "")
_SPECIAL_METHODS: Final = ("__init__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__", "__or__", "__and__")
"""Special methods whose errors are shortened, too."""


def short_errors(target: Target) -> Target:
    """Decorates what users call: errors leave it without frames of this package.

    On a function, or on a class for each public method and cached property that it defines; of generators, for each step.
    """
    return _decorated(target, lambda error, _: shorten(error))


def short_store_errors(target: Target) -> Target:
    """Does the same for a class whose `url` is a store, and adds the store to the commands in the errors."""

    def prepare(error: StoreError, arguments: Sequence[Any]) -> None:
        url = getattr(arguments[0], "url", None)
        if isinstance(url, str):  # not before `__init__` has set it
            name_store(error, url)
        shorten(error)

    return _decorated(target, prepare)


def _decorated(target: Target, prepare: Prepare) -> Target:
    if isinstance(target, type):
        for name, member in list(vars(target).items()):
            if name in _SPECIAL_METHODS or not name.startswith("_"):
                _decorate_member(target, name, member, prepare)
        return target

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = target(*args, **kwargs)
        except StoreError as exc:
            prepare(exc, args)
            raise
        except TypeError as exc:
            if not _takes(target, args, kwargs):
                exc.__traceback__ = None  # the caller's mistake: no frame in here says more
            raise
        return _iterated(result, prepare, args) if isinstance(result, GeneratorType) else result

    return call  # type: ignore[return-value]


def _takes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _decorate_member(owner: type, name: str, member: object, prepare: Prepare) -> None:
    if isinstance(member, FunctionType):
        setattr(owner, name, _decorated(member, prepare))
    elif isinstance(member, classmethod | staticmethod):
        setattr(owner, name, type(member)(_decorated(member.__func__, prepare)))
    elif isinstance(member, functools.cached_property):
        member.func = _decorated(member.func, prepare)


def _iterated(generator: Generator[Any, Any, Any], prepare: Prepare, arguments: Sequence[Any]) -> Generator[Any, Any, Any]:
    try:
        return (yield from generator)
    except StoreError as exc:
        prepare(exc, arguments)
        raise


def shorten(error: StoreError) -> None:
    """Prepares an error for a user: without frames of this package, and without causes that its message repeats."""
    if _logger.isEnabledFor(logging.DEBUG):
        return
    more = f"`tsck help {error.kind}` says what to do"
    if more not in getattr(error, "__notes__", ()):
        error.add_note(more)
    error.__traceback__ = _users(error.__traceback__, with_installed=True)
    chained = _shown_reason(error)
    for _ in range(100):  # a chain may have a ring
        if chained is None:
            break
        chained.__traceback__ = _users(chained.__traceback__)
        chained = _shown_reason(chained)


def user_stacklevel() -> int:
    """The `stacklevel` of a warning, for the function that calls this: the first frame outside of this package and of Python's library.

    Where there is none, in a thread of this package, it is more than there are frames, and the warning names no line.
    """
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_is_ours(frame) or _is_library(frame.f_code.co_filename)):
        level, frame = level + 1, frame.f_back
    return level


def _shown_reason(error: BaseException) -> BaseException | None:
    """The exception that a traceback shows before `error`; those that say nothing to the user are not shown any more."""
    if error.__cause__ is not None:
        if str(error.__cause__) in str(error):
            error.__cause__ = None  # this suppresses the context, too
        return error.__cause__
    context = None if error.__suppress_context__ else error.__context__
    if context is not None and _users(context.__traceback__) is None:
        error.__suppress_context__, context = True, None  # it was raised and handled in here
    return context


def _users(traceback: TracebackType | None, *, with_installed: bool = False) -> TracebackType | None:
    """The frames of the user: not those of this package, of Python's own library and, except `with_installed`, of other packages."""
    kept = None
    for each in reversed([*_frames(traceback)]):
        name = each.tb_frame.f_code.co_filename
        if not _is_library(name) and not _is_ours(each.tb_frame) and (with_installed or not _is_installed(name)):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _is_ours(frame: FrameType) -> bool:
    """By the module's name, since the methods that dataclasses generate have no file."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE


def _is_library(file: str) -> bool:
    return file.startswith((_LIBRARY, "<frozen ")) and not _is_installed(file)


def _is_installed(file: str) -> bool:
    return f"{os.sep}site-packages{os.sep}" in file


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
