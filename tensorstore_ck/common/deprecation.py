"""Earlier spellings of arguments and methods: they work for one more release, with a DeprecationWarning."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tensorstore_ck.common.user_frames import user_stacklevel

P = ParamSpec("P")
T = TypeVar("T")
Target = TypeVar("Target", bound=Callable[..., Any])


def renamed_argument(**new_names: str) -> Callable[[Target], Target]:
    """``@renamed_argument(old="new")`` on a function, or on a class for its ``__init__``: a call with ``old=`` passes ``new=``."""

    def decorate(target: Target) -> Target:
        function: Callable[..., Any] = vars(target)["__init__"] if isinstance(target, type) else target

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in new_names.items():
                if old not in kwargs:
                    continue
                if new in kwargs:
                    raise TypeError(f"{target.__name__}() got both {new}= and {old}=, its earlier spelling")
                warnings.warn(f"{target.__name__}({old}=) is now {new}=", DeprecationWarning, stacklevel=user_stacklevel())
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        if isinstance(target, type):
            target.__init__ = call  # type: ignore[misc]
            return target
        return call  # type: ignore[return-value]

    return decorate


def renamed_method(old: str, method: Callable[P, T]) -> Callable[P, T]:
    """`method` under its earlier name, to be assigned to that name in the class."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        warnings.warn(f"{old}() is now {method.__name__}()", DeprecationWarning, stacklevel=user_stacklevel())
        return method(*args, **kwargs)

    return call
