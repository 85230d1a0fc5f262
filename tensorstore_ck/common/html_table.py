"""Tables for notebooks: HTML in which all text is escaped, since names in a store are untrusted."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from typing import Final

from tensorstore_ck.redaction import one_line

MAX_ROWS: Final = 200
"""A notebook keeps what it shows."""
GLANCE_ROWS: Final = 20
"""For an object that a notebook shows unasked, such as a store."""


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]], max_rows: int = MAX_ROWS) -> str:
    """A table. With more than `max_rows` rows: the first ones, and a row with the number of the others."""
    rows = iter(rows)
    shown = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in islice(rows, max_rows)]
    if rest := sum(1 for _ in rows):
        shown.append(f'<td colspan="{len(header)}">... and {rest:,} more</td>')
    head = "".join(f"<th>{_text(title)}</th>" for title in header)
    body = "".join(f"<tr>{row}</tr>" for row in shown)
    return f"<table><caption>{_text(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(cell: object) -> str:
    return "" if cell is None else escape(one_line(str(cell)))
