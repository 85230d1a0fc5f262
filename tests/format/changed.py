"""Changes one value inside a decoded body, so that it stays a body: mutations that reach past the first check of a decoder."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

NUMBERS: Final = [
    0,
    1,
    -1,
    *(sign + (1 << bits) for bits in (7, 8, 16, 22, 31, 32, 40, 48, 63) for sign in (-1, 0)),
    (1 << 64) - 1,
    -(1 << 63),
]
OTHERS: Final[list[Any]] = [
    *(None, True, False, 1.0, float("nan"), "", "x", b"", b"x", bytes(16), bytes(32)),
    *([], [None], {}, {"x": 1.0}, ["t", 0, 0]),
]


def changed(body: Any, chance: random.Random, change_bytes: Callable[[bytes, int], bytes]) -> Any:
    """`body` with one value changed; `change_bytes` changes some bytes of at most so many."""
    places = list(_places(body))
    if not places:
        return copy.deepcopy(chance.choice(OTHERS))
    container, key = chance.choice(places)
    old = container[key]
    match chance.randrange(6):
        case 0:
            container[key] = chance.choice(NUMBERS)
        case 1:
            container[key] = copy.deepcopy(chance.choice(OTHERS))
        case 2:
            other, other_key = chance.choice(places)
            container[key] = other[other_key] if not isinstance(other[other_key], list | dict) else chance.choice(NUMBERS)
        case 3:
            del container[key]
        case 4 if isinstance(container, list):
            container.insert(key, old)
        case _ if isinstance(old, bytes):
            container[key] = change_bytes(old, len(old) + 64)
        case _ if isinstance(old, str):
            container[key] = change_bytes(old.encode(), len(old) + 16).decode(errors="replace")
        case _:
            container[key] = chance.choice(NUMBERS)
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def changed_bytes(data: bytes, chance: random.Random) -> bytes:
    """Bytes that differ in one place: of a number, of one bit, in length, or in all."""
    if not data:
        return chance.randbytes(chance.randrange(1, 40))
    at = chance.randrange(len(data))
    match chance.randrange(6):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 1:
            number = (chance.choice(NUMBERS) & (1 << 64) - 1).to_bytes(8, "little")[: chance.choice((1, 2, 4, 8))]
            at -= at % len(number)
            return (data[:at] + number + data[at + len(number) :])[: len(data)]
        case 2:
            return data[:at]
        case 3:
            return data + data[at:]
        case 4:
            return chance.randbytes(len(data))
        case _:
            return data[:at] + data[at + chance.choice((1, 8, 32)) :]
