"""Sealed objects: a magic, a msgpack body and a hash over both, decoded strictly. Pure. Format: FORMAT.md, "Sealed objects".

`check_msgpack` walks the bytes before anything is allocated for them, so that a hostile length, depth or count costs no memory. The
walk takes time per item; there are few, because ids and extents are raw arrays inside a ``bin``. Objects that were compressed in the
store are decoded under a `ParseBudget`. `pack_body` only writes what readers accept. `object_name` names the objects that a ULID names.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgpack

from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, Ulid, derived_hash, ulid_text
from tensorstore_ck.errors import CorruptObjectError, FormatVersionError, UnsupportedValueError

FORMAT_VERSION: Final = 1
MAGIC: Final = b"TSCK"
HEADER_BYTES: Final = 8
MAX_DEPTH: Final = 128
MAX_OBJECT_BYTES: Final = 256 << 20
MAX_BODY_BYTES: Final = MAX_OBJECT_BYTES - HEADER_BYTES - DIGEST_BYTES
MAX_ITEMS: Final = 1 << 24
"""Values in one body, so the number of Python objects that a decoder creates."""

MAX_FEW_ITEMS: Final = 1 << 16
"""The same outside of layouts and log entries: what is many there is a raw array inside a ``bin``."""

FREE_BYTES: Final = 64 << 20
"""Memory that parsing a snapshot of any size may use."""
BYTES_PER_STORED: Final = 2048
"""Memory that each stored byte adds to that. Measured: models need 10 to 60, the worst states (lists of tuples of None) 1,725."""
BYTES_PER_ITEM: Final = 256
"""Memory of one msgpack item: a Python object, usually with a leaf of a tree and its name."""

KINDS: Final = {
    "layout": b"LAYO",
    "part": b"PART",
    "snapshot": b"SNAP",
    "moved": b"MOVE",
    "log": b"LOGE",
    "checkpoint": b"CKPT",
    "writer": b"WRIT",
    "proof": b"PROO",
}
"""Kind of object -> the four bytes after the magic."""
_MANY_ITEMS: Final = frozenset({"layout", "log"})

Body = dict[str, Any]
T = TypeVar("T")


class ParseBudget:
    """Limits the memory to decode one snapshot in proportion to its stored bytes, so that a few bytes cannot ask for gigabytes.

    It applies to compressed objects; uncompressed bytes cost at most 257 bytes of memory each.
    """

    def __init__(self, free_bytes: int = FREE_BYTES) -> None:
        self._free_bytes = free_bytes
        self._stored_bytes = 0
        self._spent_bytes = 0

    def add_stored(self, size_bytes: int) -> None:
        """Counts an object, or an encoded block, that belongs to the snapshot."""
        self._stored_bytes += size_bytes

    def spend(self, size_bytes: int, items: int, name: str) -> None:
        """Counts decoded bytes and msgpack items. Raises `CorruptObjectError` if the stored bytes do not allow that much."""
        spent_bytes = self._spent_bytes + size_bytes + BYTES_PER_ITEM * items
        allowed_bytes = self._free_bytes + BYTES_PER_STORED * self._stored_bytes
        if spent_bytes > allowed_bytes:
            raise CorruptObjectError(
                f"{name} would take at least {spent_bytes:,} bytes of memory to parse; a snapshot with {self._stored_bytes:,} stored bytes "
                f"may take {allowed_bytes:,}: it was made to exhaust memory; do not use this snapshot",
                object_id=name,
            )
        self._spent_bytes = spent_bytes

    def max_items(self, size_bytes: int) -> int:
        """How many items `size_bytes` decoded bytes may hold."""
        left_bytes = self._free_bytes + BYTES_PER_STORED * self._stored_bytes - self._spent_bytes - size_bytes
        return max(0, left_bytes // BYTES_PER_ITEM)


def pack_body(value: object) -> bytes:
    """The msgpack of `value`, within the limits of `unpack_body`.

    Raises:
        UnsupportedValueError: `value` is too large for one object, or has a type that msgpack lacks.
    """
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True)
        if len(packed) > MAX_BODY_BYTES:
            raise ValueError(f"it has {len(packed)} bytes, the limit is {MAX_BODY_BYTES}")
        if len(packed) > MAX_ITEMS:  # a smaller one cannot have too many items
            check_msgpack(memoryview(packed), "it")
    except (ValueError, TypeError, OverflowError, RecursionError, CorruptObjectError) as exc:
        raise UnsupportedValueError(f"a value cannot be stored: {exc}; make it smaller, or of plain types") from exc
    return packed


def seal(kind: str, body: Mapping[str, object]) -> bytes:
    """``magic | kind | msgpack body | BLAKE3 of all before it, in the kind's derive-key context``."""
    head = MAGIC + KINDS[kind], pack_body({"v": FORMAT_VERSION, **body})
    return b"".join((*head, seal_of(kind, *head)))


def seal_of(kind: str, *head: bytes | memoryview) -> Digest:
    """The hash at the end of a sealed object, of everything before it."""
    return derived_hash(f"{kind} object", *head)


def object_hash(sealed: bytes) -> Digest:
    """The hash at the end of a sealed object, by which other objects name it."""
    return Digest(sealed[-DIGEST_BYTES:])


def unseal(kind: str, data: bytes, name: str, budget: ParseBudget | None = None) -> Body:
    """The body of a sealed object. `budget` is the snapshot's, for an object that was compressed.

    Raises:
        CorruptObjectError: an object of another kind, or its hash does not match.
        FormatVersionError: the object has a newer format version.
    """
    if len(data) < HEADER_BYTES + DIGEST_BYTES or data[:HEADER_BYTES] != MAGIC + KINDS[kind]:
        raise CorruptObjectError(f"{name} is not a {kind} object; run `tsck fsck`", object_id=name)
    if seal_of(kind, memoryview(data)[:-DIGEST_BYTES]) != data[-DIGEST_BYTES:]:
        raise CorruptObjectError(f"{name} does not match its hash: it was damaged; run `tsck fsck`", object_id=name)
    body = unpack_body(memoryview(data)[HEADER_BYTES:-DIGEST_BYTES], name, budget, None if kind in _MANY_ITEMS else MAX_FEW_ITEMS)
    if type(body) is not dict or type(body.get("v")) is not int:
        raise CorruptObjectError(f"{name} has no version", object_id=name)
    if body["v"] != FORMAT_VERSION:
        raise FormatVersionError(
            f"{name} has format version {body['v']}; this build reads version {FORMAT_VERSION}: upgrade tensorstore_ck", object_id=name
        )
    return body


def unpack_body(data: memoryview, name: str, budget: ParseBudget | None = None, max_items: int | None = None) -> Any:
    """Decodes msgpack after `check_msgpack`. Raises `CorruptObjectError` if it is not msgpack of the form that `pack_body` writes."""
    if len(data) > MAX_BODY_BYTES:
        raise CorruptObjectError(f"{name} has {len(data)} bytes, more than an object may have", object_id=name)
    check_msgpack(data, name, budget, max_items)
    try:
        return msgpack.unpackb(
            data, object_pairs_hook=_map, strict_map_key=False, max_array_len=len(data), max_map_len=len(data), max_ext_len=0
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as exc:
        raise CorruptObjectError(f"{name} is not decodable: {exc}", object_id=name) from exc


def _map(pairs: list[tuple[object, object]]) -> dict[str, object]:
    items = {key: value for key, value in pairs if type(key) is str}
    if len(items) != len(pairs):
        raise ValueError("a map has a repeated key, or a key that is not text")
    return items


def take(body: Body, key: str, kind: type[T]) -> T:
    """The value of `key`. Raises `TypeError` if its type is not exactly `kind`; decoders turn this into a `CorruptObjectError`."""
    value = body.get(key)
    if type(value) is not kind:
        raise TypeError(f"{key} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def take_count(body: Body, key: str) -> int:
    """The value of `key`, an integer from 0 to 2**63 - 1.

    Raises:
        TypeError, ValueError: it is not.
    """
    value = take(body, key, int)
    if not 0 <= value < 1 << 63:
        raise ValueError(f"{key} is {value}")
    return value


def take_digest(body: Body, key: str) -> Digest:
    """The value of `key`, a hash.

    Raises:
        TypeError, ValueError: it is not.
    """
    value = take(body, key, bytes)
    if len(value) != DIGEST_BYTES:
        raise ValueError(f"{key} has {len(value)} bytes")
    return Digest(value)


def _payload_bytes(byte: int) -> int:
    """How many bytes follow the first byte of a value whose size it determines; -1 for all others."""
    if byte <= 0x7F or byte >= 0xE0 or byte in (0xC0, 0xC2, 0xC3):
        return 0
    if 0xA0 <= byte <= 0xBF:
        return byte & 0x1F
    return {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}.get(byte, -1)


_PAYLOAD_BYTES: Final = [_payload_bytes(byte) for byte in range(256)]
_LENGTH_BYTES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_COUNT_BYTES: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def check_msgpack(data: memoryview, name: str, budget: ParseBudget | None = None, max_items: int | None = None) -> None:
    """Walks one msgpack value: complete, nothing after it, no extension types, bounded items and depth. Charges it to `budget`.

    Source: https://github.com/msgpack/msgpack/blob/master/spec.md

    Raises:
        CorruptObjectError: the value breaks one of these rules, or exceeds the budget.
    """
    size = len(data)
    max_items = MAX_ITEMS if max_items is None else max_items
    if budget is not None:
        max_items = min(max_items, budget.max_items(size))
    position = items = 0
    remaining, outer = 1, [0]
    while outer:
        if not remaining:
            remaining = outer.pop()
            continue
        remaining -= 1
        if position >= size:
            raise CorruptObjectError(f"{name} is truncated", object_id=name)
        byte = data[position]
        position += 1
        payload = _PAYLOAD_BYTES[byte]
        if payload >= 0:
            position += payload
            continue
        if byte in _LENGTH_BYTES:
            width = _LENGTH_BYTES[byte]
            position += width + int.from_bytes(data[position : position + width], "big")
            continue
        if byte in _COUNT_BYTES:
            width = _COUNT_BYTES[byte]
            count = int.from_bytes(data[position : position + width], "big") * (2 if byte >= 0xDE else 1)
            position += width
        elif byte <= 0x9F:
            count = (byte & 0x0F) * (2 if byte <= 0x8F else 1)
        else:
            raise CorruptObjectError(f"{name} has the msgpack type {byte:#x}, which is not in the format", object_id=name)
        items += count
        if budget is not None and items > max_items:
            budget.spend(size, items, name)
        if count > size - position or items > max_items:
            raise CorruptObjectError(f"{name} claims {count} items in {size - position} bytes, {items} in all", object_id=name)
        outer.append(remaining)
        remaining = count
        if len(outer) > MAX_DEPTH:
            raise CorruptObjectError(f"{name} is nested deeper than {MAX_DEPTH}", object_id=name)
    if position != size:
        raise CorruptObjectError(f"{name} has {size - position} bytes too many or too few", object_id=name)
    if budget is not None:
        budget.spend(size, items, name)


FOLDERS: Final[Mapping[str, str]] = {"pack": "packs", "part": "parts", "snapshot": "snapshots", "moved": "moved"}
"""Kind of object -> its folder, which is also the field of a log operation that lists such objects."""

FIXED_FOLDERS: Final = ("checkpoint", *FOLDERS.values(), "writers")
"""The folders of a store's objects, except those of logs: store.json has their names."""


def object_name(kind: str, ulid: Ulid) -> str:
    """The name in the store of an object; `kind` is a key of `FOLDERS`."""
    text = ulid_text(ulid)
    return f"{FOLDERS[kind]}/{text[-2:]}/{text}"
