"""The memory that the puts of one store handle are captured into: made when it is first needed."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorstore_ck.errors import NoSpaceError
from tensorstore_ck.sizes import human_bytes

if TYPE_CHECKING:
    from tensorstore_ck.state.arena import Arena, Slot


class CaptureMemory:
    """Slots of one arena. The caller has a lock."""

    def __init__(self, open_arena: "Callable[[], Arena]") -> None:
        self._open_arena = open_arena
        self.arena: Arena | None = None

    def try_take(self, needed_bytes: int, what: str) -> "Slot | None":
        """Memory for one capture; None if there is none now. `what` it is for begins the message.

        Raises:
            NoSpaceError: there will never be so much.
        """
        if self.arena is None:
            self.arena = self._open_arena()
        limit = self.arena.limit_bytes
        if needed_bytes > limit:
            raise NoSpaceError(
                f"{what} needs {human_bytes(needed_bytes)} of host memory to capture into, and host_memory_bytes is {human_bytes(limit)}: "
                "raise it in tsck.open, name what does not change in frozen=, or use put_snapshot, which copies nothing",
                object_id="host_memory_bytes",
            )
        return self.arena.take(needed_bytes)

    @property
    def allocated_bytes(self) -> int:
        """What captures hold, and what is kept for the next ones."""
        return self.arena.allocated_bytes if self.arena is not None else 0

    def close(self) -> None:
        """Frees what nobody uses."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None
