"""A pickle reader that runs nothing: it creates plain containers, and objects that a table allows.

Names in a pickle are looked up only in that table: no module is imported, no attribute is read, no class outside it is called. Any other
name becomes an `UnknownObject`, which accepts whatever the pickle does with it; the caller finds it in the result, and rejects it
by its path. Pure. Invariants: sizes are checked before use, there is no recursion, the numbers of objects and of copied bytes are bounded,
and keys obey `key_types`.
"""

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tensorstore_ck.integrations.importing.key_types import HashCrowding, require_cheap_keys
from tensorstore_ck.integrations.importing.malformed import MalformedError, printable
from tensorstore_ck.integrations.importing.placeholders import AllowedGlobal, UnknownObject

MAX_PICKLE_BYTES: Final = 256 << 20
MAX_OBJECTS: Final = 16_000_000
"""Containers and created objects of one pickle: one byte of the pickle may create one, of up to a few hundred bytes."""
MAX_MARKS: Final = 10_000
"""Nested unfinished containers: the limit for a state is much lower."""
MAX_INT_BYTES: Final = 4096
COPIES: Final = 8
"""How often a pickle's content may be copied, on average: many calls may use one list as their argument."""
FREE_COPIES: Final = 1 << 20
"""Allowed copies for a pickle of any length."""

_SIZED: Final = frozenset({str, bytes, bytearray, list, tuple, set, frozenset, dict, OrderedDict, defaultdict, Counter})


FindGlobal = Callable[[str, str], object]
"""(module, name) -> an `AllowedGlobal`, or the plain value of the name; LookupError for other names."""


def safe_unpickle(data: memoryview, find: FindGlobal, persistent: Callable[[Any], Any] | None = None) -> tuple[Any, int, set[str]]:
    """The object of one pickle, which more bytes may follow, the end of the pickle, and the names in it that are not allowed.

    `persistent` returns the object of a persistent id; it raises ValueError or TypeError for an unknown one. Raises `MalformedError` if the
    pickle is damaged, too large, or uses an unsupported instruction.
    """
    unpickler = _SafeUnpickler(data, find, persistent)
    try:
        result = unpickler.run()
    except MalformedError:
        raise
    except (IndexError, KeyError, struct.error) as exc:
        raise MalformedError(f"it is cut off or damaged near byte {unpickler.at}") from exc
    except (ValueError, TypeError, OverflowError, RuntimeError, MemoryError) as exc:  # from `AllowedGlobal.make`, for wrong arguments
        what = str(exc).partition("\n")[0] or type(exc).__name__
        raise MalformedError(f"{printable(what)} (near byte {unpickler.at})") from exc
    return result, unpickler.at, unpickler.unknown


class _SafeUnpickler:
    def __init__(self, data: memoryview, find: FindGlobal, persistent: Callable[[Any], Any] | None) -> None:
        self.data = data
        self.at = 0
        self.unknown: set[str] = set()
        self._find = find
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._objects = 0
        self._found: dict[tuple[str, str], object] = {}
        self._copied = 0
        self._crowding = HashCrowding()

    def run(self) -> Any:
        data, table = self.data, _TABLE
        while self.at < MAX_PICKLE_BYTES:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                (result,) = self._stack
                if self._marks or isinstance(result, AllowedGlobal):
                    raise MalformedError("it ends in the middle of something")
                return result
            step = table.get(code)
            if step is None:
                raise MalformedError(f"it has the instruction {bytes([code])!r} at byte {self.at - 1}, which no checkpoint uses")
            step(self)
        raise MalformedError(f"it is longer than {MAX_PICKLE_BYTES >> 20} MiB")

    # --- bytes --------------------------------------------------------------------------------------------------------

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise MalformedError(f"it claims {size} bytes at byte {self.at}, where {len(self.data) - self.at} are left")
        view = self.data[self.at : self.at + size]
        self.at += size
        return view

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def line(self) -> str:
        for end in range(self.at, min(self.at + 1024, len(self.data))):
            if self.data[end] == 10:
                text = str(self.data[self.at : end], "utf-8")
                self.at = end + 1
                return text
        raise MalformedError(f"it has a name without an end at byte {self.at}")

    # --- stack --------------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def push_new(self, value: Any) -> None:
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            raise MalformedError(f"it makes more than {MAX_OBJECTS:,} objects")
        self._stack.append(value)

    def mark(self) -> None:
        if len(self._marks) == MAX_MARKS:
            raise MalformedError("it is nested too deep")
        self._marks.append(self._stack)
        self._stack = []

    def pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        if any(isinstance(item, AllowedGlobal) for item in items):
            return [plain_of(item) for item in items]
        return items

    def pop(self) -> Any:
        return plain_of(self._stack.pop())

    def pop_anything(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.pop_mark()

    def tuple_of(self, count: int) -> None:
        items = tuple([plain_of(item) for item in self._stack[-count:]])
        if len(items) != count:
            raise IndexError
        del self._stack[-count:]
        self.push_new(items)

    def memoize(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def recall(self, number: int) -> None:
        self._stack.append(self._memo[number])

    # --- containers ---------------------------------------------------------------------------------------------------

    def append(self, items: Sequence[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(items)
        elif isinstance(target, UnknownObject):
            target.held.extend(items)
        else:
            raise MalformedError(f"it appends to a {type(target).__name__}")

    def set_items(self, items: Sequence[Any]) -> None:
        target = self._stack[-1]
        if len(items) % 2:
            raise MalformedError("it has a key without a value")
        if type(target) in (dict, OrderedDict, Counter, defaultdict):
            self.copy(self._crowding.add(target, items[::2]))
            for key, value in zip(items[::2], items[1::2], strict=True):
                target[key] = value
        elif isinstance(target, UnknownObject):
            target.held.extend(items)
        else:
            raise MalformedError(f"it sets items of a {type(target).__name__}")

    def add_items(self, items: Sequence[Any]) -> None:
        target = self._stack[-1]
        if type(target) is set:
            self.copy(self._crowding.add(target, items))
            target.update(items)
        elif isinstance(target, UnknownObject):
            target.held.extend(items)
        else:
            raise MalformedError(f"it adds to a {type(target).__name__}")

    def copy(self, size: int) -> None:
        """Counts items or bytes that are copied or iterated again."""
        self._copied += size
        if self._copied > FREE_COPIES + COPIES * self.at:
            raise MalformedError(f"it has {self.at} bytes so far, and asks for copies of {self._copied} items in them")

    # --- objects ------------------------------------------------------------------------------------------------------

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > 1024:
            raise MalformedError("it has a malformed name")
        key = module, name
        if key not in self._found:
            try:
                self._found[key] = self._find(module, name)
            except LookupError:
                full = printable(f"{module}.{name}")
                self.unknown.add(full)
                self._found[key] = UnknownObject(full)
        self._stack.append(self._found[key])

    def make(self, args: Any) -> None:
        """Replaces the callable on the stack by its result."""
        maker = self._stack.pop()
        if isinstance(maker, UnknownObject):
            self.push_new(UnknownObject(maker.name, args))
            return
        if not isinstance(maker, AllowedGlobal) or maker.make is None or type(args) is not tuple:
            raise MalformedError(f"it calls a {maker.name if isinstance(maker, AllowedGlobal) else type(maker).__name__}")
        if any(isinstance(arg, UnknownObject) for arg in args):
            # for example a tensor subclass: a known function with an unknown class as its argument
            self.push_new(UnknownObject(next(arg.name for arg in args if isinstance(arg, UnknownObject)), args))
            return
        self.copy(sum(len(arg) for arg in args if type(arg) in _SIZED))
        self.push_new(maker.make(*args))

    def build(self) -> None:
        state = self.pop()
        target = self._stack[-1]
        parts = state if type(state) is tuple else state.values() if type(state) is dict else ()
        self.copy(sum(len(part) for part in (state, *parts) if type(part) in _SIZED))
        if isinstance(target, UnknownObject):
            target.held.append(state)
        elif type(target) is OrderedDict:
            if type(state) is not dict or set(state) != {"_metadata"}:
                raise MalformedError("it sets attributes of an OrderedDict that checkpoints do not have")
            vars(target).update(state)
        elif type(target) is dict:  # a Namespace, or a dict with attributes
            if type(state) is not dict or not all(type(key) is str for key in state):
                raise MalformedError("it sets malformed attributes")
            target.update(state)
        elif callable(build := getattr(target, "build", None)):
            build(state)
        else:
            raise MalformedError(f"it sets the state of a {type(target).__name__}")

    def persistent_id(self) -> None:
        if self._persistent is None:
            raise MalformedError("it references something outside of itself")
        self.push(self._persistent(self.pop()))


def plain_of(item: Any) -> Any:
    """The value of an item on the stack: of a name that is not called, the name's value."""
    return item.value if isinstance(item, AllowedGlobal) and item.value is not None else item


def _nothing(_: object) -> None:
    pass


def _bytes(unpickler: _SafeUnpickler, size: int) -> None:
    unpickler.push_new(bytes(unpickler.take(size)))


def _text(unpickler: _SafeUnpickler, size: int) -> None:
    unpickler.push(str(unpickler.take(size), "utf-8", "surrogatepass"))


def _old_text(unpickler: _SafeUnpickler, size: int) -> None:
    """Text of Python 2, read as torch does."""
    unpickler.push(str(unpickler.take(size), "utf-8"))


def _long(unpickler: _SafeUnpickler, size: int) -> None:
    if not 0 <= size <= MAX_INT_BYTES:
        raise MalformedError(f"it has an integer of {size} bytes")
    unpickler.push(int.from_bytes(unpickler.take(size), "little", signed=True))


_U1, _U2, _U4, _U8 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")
_STOP: Final = ord(".")


def _protocol(unpickler: _SafeUnpickler) -> None:
    if unpickler.number(_U1) > 5:
        raise MalformedError("it has an unknown pickle protocol")


def _pair(unpickler: _SafeUnpickler) -> list[Any]:
    value, key = unpickler.pop(), unpickler.pop()
    return [key, value]


def _named_args(unpickler: _SafeUnpickler) -> None:
    named, args = unpickler.pop(), unpickler.pop()
    if named and not isinstance(unpickler._stack[-1], UnknownObject):
        raise MalformedError("it creates an object with named arguments")
    unpickler.make(args)


_TABLE: Final[Mapping[int, Callable[[_SafeUnpickler], None]]] = {
    ord(code): step
    for code, step in {
        "\x80": _protocol,
        "\x95": lambda m: _nothing(m.number(_U8)),  # the length of a frame is not needed
        "(": _SafeUnpickler.mark,
        "0": _SafeUnpickler.pop_anything,
        "1": lambda m: _nothing(m.pop_mark()),
        "2": lambda m: m.push(m._stack[-1]),
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "J": lambda m: m.push(m.number(_I4)),
        "K": lambda m: m.push(m.number(_U1)),
        "M": lambda m: m.push(m.number(_U2)),
        "\x8a": lambda m: _long(m, m.number(_U1)),
        "\x8b": lambda m: _long(m, m.number(_I4)),
        "G": lambda m: m.push(m.number(_F8)),
        "X": lambda m: _text(m, m.number(_U4)),
        "\x8c": lambda m: _text(m, m.number(_U1)),
        "\x8d": lambda m: _text(m, m.number(_U8)),
        "U": lambda m: _old_text(m, m.number(_U1)),
        "T": lambda m: _old_text(m, m.number(_U4)),
        "B": lambda m: _bytes(m, m.number(_U4)),
        "C": lambda m: _bytes(m, m.number(_U1)),
        "\x8e": lambda m: _bytes(m, m.number(_U8)),
        "\x96": lambda m: m.push_new(bytearray(m.take(m.number(_U8)))),
        ")": lambda m: m.push(()),
        "\x85": lambda m: m.tuple_of(1),
        "\x86": lambda m: m.tuple_of(2),
        "\x87": lambda m: m.tuple_of(3),
        "t": lambda m: m.push_new(tuple(m.pop_mark())),
        "]": lambda m: m.push_new([]),
        "l": lambda m: m.push_new(list(m.pop_mark())),
        "a": lambda m: m.append([m.pop()]),
        "e": lambda m: m.append(m.pop_mark()),
        "}": lambda m: m.push_new({}),
        "s": lambda m: m.set_items(_pair(m)),
        "u": lambda m: m.set_items(m.pop_mark()),
        "\x8f": lambda m: m.push_new(set()),
        "\x90": lambda m: m.add_items(m.pop_mark()),
        "\x91": lambda m: m.push_new(frozenset(require_cheap_keys(m.pop_mark()))),
        "q": lambda m: m.memoize(m.number(_U1)),
        "r": lambda m: m.memoize(m.number(_U4)),
        "\x94": lambda m: m.memoize(len(m._memo)),
        "h": lambda m: m.recall(m.number(_U1)),
        "j": lambda m: m.recall(m.number(_U4)),
        "c": lambda m: m.name(m.line(), m.line()),
        "\x93": lambda m: m.name(*_pair(m)),
        "R": lambda m: m.make(m.pop()),
        "\x81": lambda m: m.make(m.pop()),
        "\x92": _named_args,
        "b": _SafeUnpickler.build,
        "Q": _SafeUnpickler.persistent_id,
    }.items()
}
"""The instructions of protocols 2 to 5, without those for registered extensions, calls by text and external buffers."""
