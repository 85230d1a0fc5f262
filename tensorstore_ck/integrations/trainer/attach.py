"""Makes an object of a trainer save into a store: its class gets a mixin, and all that refers to the object sees the same one."""

from collections.abc import Callable

from tensorstore_ck.errors import InvalidOptionError


def attach(target: object, mixin: type, native: type, begin: Callable[[], None], *, title: str, expected: str) -> None:
    """Mixes `mixin` into the class of `target` and calls `begin`; if that fails, `target` is as it was.

    Args:
        target: The object.
        mixin: What changes its methods.
        native: The trainer's class.
        begin: Prepares the object.
        title: What it is called in messages.
        expected: What the user should have passed.

    Raises:
        InvalidOptionError: it saves into a store already, or it is no object of the class.
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
