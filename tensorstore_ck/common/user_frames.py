"""Errors and warnings as a user's script sees them: errors without frames of this package, warnings at the user's line.

With the logger ``tensorstore_ck`` at debug level all frames stay.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, FunctionType, TracebackType
from typing import Any, Final, TypeVar

from tensorstore_ck.common.printed_commands import name_store
from tensorstore_ck.errors import StoreError

Target = TypeVar("Target", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)
_logger: Final = logging.getLogger("tensorstore_ck")
_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_LIBRARY: Final = os.path.join(os.path.dirname(os.__file__), "")
_HIDDEN_METHODS: Final = ("__init__", "__enter__", "__exit__")
"""Special methods whose errors are shortened, too."""


def short_errors(target: Target) -> Target:
    """Decorates a public function, or each public method that a class defines: its errors leave without frames of this package."""
    if isinstance(target, type):
        for name, method in _shown_methods(target):
            setattr(target, name, short_errors(method))
        return target
    return _preparing(target, lambda error, _: shorten(error))


def short_store_errors(kind: Kind) -> Kind:
    """Does the same for a class whose `url` is a store, and adds the store to the commands in the errors."""

    def prepare(error: StoreError, arguments: Sequence[Any]) -> None:
        name_store(error, arguments[0].url)
        shorten(error)

    for name, method in _shown_methods(kind):
        setattr(kind, name, short_errors(method) if name in _HIDDEN_METHODS else _preparing(method, prepare))
    return kind


def _shown_methods(kind: type) -> list[tuple[str, FunctionType]]:
    methods = [(name, method) for name, method in vars(kind).items() if isinstance(method, FunctionType)]
    return [(name, method) for name, method in methods if name in _HIDDEN_METHODS or not name.startswith("_")]


def _preparing(function: Target, prepare: Callable[[StoreError, Sequence[Any]], object]) -> Target:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except StoreError as exc:
            prepare(exc, args)
            raise

    return call  # type: ignore[return-value]


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
    while frame is not None and (frame.f_code.co_filename.startswith(_PACKAGE) or _is_library(frame.f_code.co_filename)):
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
        if not _is_library(name) and not name.startswith(_PACKAGE) and (with_installed or not _is_installed(name)):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _is_library(file: str) -> bool:
    return file.startswith((_LIBRARY, "<frozen ")) and not _is_installed(file)


def _is_installed(file: str) -> bool:
    return f"{os.sep}site-packages{os.sep}" in file


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
