"""Bytes as callers pass them, and flat views of them."""

from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview


def byte_views(data: Sequence[Buffer]) -> list[memoryview]:
    """The buffers as flat views of bytes, empty ones left out."""
    return [view for view in (memoryview(piece).cast("B") for piece in data) if len(view)]
