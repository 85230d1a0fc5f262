"""A clock for what waits, which no real time moves."""

from collections.abc import Callable


class Clock:
    """A clock that only `sleep` moves; it notifies its listeners."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.on_sleep: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)
        self.on_sleep()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Does it at the first sleep that ends then or later, and at each one after."""

        def if_due() -> None:
            if self.now >= when:
                action()

        self.on_sleep = if_due
