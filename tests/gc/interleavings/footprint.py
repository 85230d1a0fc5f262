"""What calls touch, and which of them commute. Names are bits of integers, so that sets of them are cheap."""

from typing import NamedTuple

from tests.gc.interleavings.contents import Contents, Request


class Footprint(NamedTuple):
    """The names that are read, added, deleted and listed (a list's prefix)."""

    reads: int = 0
    adds: int = 0
    deletes: int = 0
    lists: int = 0

    def union(self, other: "Footprint") -> "Footprint":
        """What is in either."""
        return Footprint(self[0] | other[0], self[1] | other[1], self[2] | other[2], self[3] | other[3])


class Names:
    """Numbers the names of an exploration."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._under: dict[str, int] = {}
        """Prefix of a list -> the names that it finds."""
        self._present: dict[Contents, tuple[int, int]] = {}

    def footprint(self, request: Request) -> Footprint:
        """Of one call."""
        bit = self._bit(request.name)
        match request.kind:
            case "list":
                self._under.setdefault(request.name, self._found_by(request.name))
                return Footprint(lists=bit)
            case "delete":
                return Footprint(deletes=bit)
            case "replace":
                return Footprint(adds=bit, deletes=bit)
            case "put" | "create":
                return Footprint(adds=bit)
        return Footprint(reads=bit)

    def interferes(self, contents: Contents, request: Request, future: Footprint) -> bool:
        """Whether what another may still do can change a call's answer, or notice the call.

        A new log entry is always noticed, as it changes what must be there. Deletes of one name do not disturb each other.
        """
        name = request.name
        bit = self._bit(name)
        match request.kind:
            case "get" | "size" | "read":
                return bool(bit & (future.deletes if name in contents.objects else future.adds))
            case "list":
                present, under = self._present_in(contents), self._under[name]
                return bool(under & (future.deletes & present | future.adds & ~present))
            case "delete":
                return bool(bit & (future.reads | future.adds)) or self._is_listed(name, future)
            case "create" if name.startswith("log/"):
                return True
        return bool(bit & (future.reads | future.adds | future.deletes)) or self._is_listed(name, future)

    def _bit(self, name: str) -> int:
        bit = self._bits.get(name)
        if bit is None:
            bit = self._bits[name] = 1 << len(self._bits)
            for prefix in self._under:
                if name.startswith(prefix):
                    self._under[prefix] |= bit
        return bit

    def _found_by(self, prefix: str) -> int:
        return sum(bit for name, bit in self._bits.items() if name.startswith(prefix))

    def _is_listed(self, name: str, future: Footprint) -> bool:
        return future.lists != 0 and any(name.startswith(prefix) and self._bits[prefix] & future.lists for prefix in self._under)

    def _present_in(self, contents: Contents) -> int:
        count, present = self._present.get(contents, (0, 0))
        if count != len(self._bits):
            present = sum(bit for name, bit in self._bits.items() if name in contents.objects)
            self._present[contents] = len(self._bits), present
        return present
