"""Rows in LMDB, read by key or in pages. Each has a checksum, since LMDB has none."""

from typing import Any, Final
from zlib import crc32

import lmdb

from tensorstore_ck.log.cache.protocol import MAX_KEY_BYTES, PAGE_ITEMS, Item

_CRC_BYTES: Final = 4


def protect(key: bytes, value: bytes) -> bytes:
    """A value as it is stored."""
    return value + crc32(value, crc32(key)).to_bytes(_CRC_BYTES, "little")


def get_row(txn: Any, key: bytes) -> bytes | None:
    """The value of `key`. Raises `lmdb.Error` if it, or the file, is damaged."""
    stored = txn.get(key) if 0 < len(key) <= MAX_KEY_BYTES else None
    return None if stored is None else _unprotect(key, stored)


def read_page(txn: Any, low: bytes, high: bytes | None, reverse: bool) -> list[Item]:
    """See `scan_pages`. Raises `lmdb.Error` if a row, or the file, is damaged."""
    items: list[Item] = []
    with txn.cursor() as cursor:
        if not reverse:
            has_row = cursor.set_range(low)
        elif high is not None and cursor.set_range(high):
            has_row = cursor.prev()
        else:
            has_row = cursor.last()
        while has_row and len(items) < PAGE_ITEMS:
            key, stored = cursor.item()
            if key < low if reverse else (high is not None and key >= high):
                break
            items.append((key, _unprotect(key, stored)))
            has_row = cursor.prev() if reverse else cursor.next()
    return items


def _unprotect(key: bytes, stored: bytes) -> bytes:
    value = stored[:-_CRC_BYTES]
    if crc32(value, crc32(key)) != int.from_bytes(stored[-_CRC_BYTES:], "little") or len(stored) < _CRC_BYTES:
        raise lmdb.CorruptedError("a value does not match its checksum")
    return value
