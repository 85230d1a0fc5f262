"""Bytes as callers pass them, flat views of them, and items in batches of up to a number of bytes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

Buffer = bytes | bytearray | memoryview


def byte_views(data: Sequence[Buffer]) -> list[memoryview]:
    """The buffers as flat views of bytes, empty ones left out."""
    views = []
    for piece in data:
        view = memoryview(piece)
        if view.nbytes:
            views.append(view.cast("B"))
    return views


def batches(items: Iterable[T], size_bytes: Callable[[T], int], max_bytes: int, max_items: int | None = None) -> Iterator[list[T]]:
    """The items in order; an item that is larger than `max_bytes` is a batch of its own."""
    batch, batch_bytes = list[T](), 0
    for item in items:
        item_bytes = size_bytes(item)
        if batch and (batch_bytes + item_bytes > max_bytes or len(batch) == max_items):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += item_bytes
    if batch:
        yield batch
