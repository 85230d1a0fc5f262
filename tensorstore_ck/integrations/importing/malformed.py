"""How foreign bytes turn out to be bad: raised where they are parsed, and turned into an error of ours where the file's name is known."""

from collections.abc import Iterator
from contextlib import contextmanager

from tensorstore_ck.errors import CorruptObjectError


class MalformedError(ValueError):
    """The bytes are not what their kind of file holds; says what is wrong, in half a sentence."""


def printable(text: object, most: int = 200) -> str:
    """`text` from a foreign file, for a message: on one line, without control characters, shortened."""
    shown = "".join(char if char.isprintable() else "?" for char in str(text)[: most + 1])
    return shown if len(shown) <= most else shown[:most] + "..."


@contextmanager
def naming_file(path: str, kind: str) -> Iterator[None]:
    """Turns a `MalformedError` raised inside into a `CorruptObjectError` that names the file."""
    try:
        yield
    except MalformedError as exc:
        what = printable(exc, 400)
        raise CorruptObjectError(f"{path} is not a sound {kind}: {what}; get or save it again", object_id=path) from exc
