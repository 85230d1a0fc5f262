"""Bytes as callers pass them, and flat views of them."""

from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview


def byte_views(data: Sequence[Buffer]) -> list[memoryview]:
    """The buffers as flat views of bytes, empty ones left out."""
    views = []
    for piece in data:
        view = memoryview(piece)
        if view.nbytes:
            views.append(view.cast("B"))
    return views
