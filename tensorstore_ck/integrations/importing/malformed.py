"""The error for malformed foreign bytes: raised by parsers, and converted to a public error where the file name is known."""

from collections.abc import Iterator
from contextlib import contextmanager

from tensorstore_ck.errors import CorruptObjectError


class MalformedError(ValueError):
    """The bytes are malformed; the message is half a sentence, such as "it is cut off"."""


def printable(text: object, most: int = 200) -> str:
    """`text` from a foreign file for a message: one line, without control characters, shortened."""
    shown = "".join(char if char.isprintable() else "?" for char in str(text)[: most + 1])
    return shown if len(shown) <= most else shown[:most] + "..."


@contextmanager
def naming_file(path: str, kind: str) -> Iterator[None]:
    """Converts a `MalformedError` into a `CorruptObjectError` that names the file."""
    try:
        yield
    except MalformedError as exc:
        what = printable(exc, 400)
        raise CorruptObjectError(f"{path} is not a valid {kind}: {what}; get or save it again", object_id=path) from exc
