"""Runs of neighbouring blocks of a pack, each read at once."""

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

Rows = npt.NDArray[Any]
"""Rows with ``offset`` and ``stored``, of one pack and by offset."""


def cut_runs(rows: Rows, max_bytes: int, max_gap_bytes: int = 0) -> Iterator[slice]:
    """Cuts rows into runs that span up to `max_bytes`, or are one block, without a gap above `max_gap_bytes`."""
    first = start = end = 0
    for row, (offset, stored) in enumerate(zip(rows["offset"].tolist(), rows["stored"].tolist(), strict=True)):
        if row and (offset + stored - start > max_bytes or offset - end > max_gap_bytes):
            yield slice(first, row)
            first = row
        if row == first:
            start = end = offset
        end = max(end, offset + stored)
    if len(rows):
        yield slice(first, len(rows))


def span_bytes(run: Rows) -> int:
    """Bytes from the start of the first block of a run to the end of its last one."""
    return int((run["offset"] + run["stored"]).max() - run["offset"][0])
