"""Errors of puts beside the training that nobody was told of yet: each is kept until it was raised to somebody."""

from tensorstore_ck.session.save.queued_put import QueuedPut


class Untold:
    """The puts that failed, and whose errors nobody has seen, oldest first. The caller locks."""

    def __init__(self) -> None:
        self._items: list[QueuedPut] = []

    def add(self, item: QueuedPut) -> None:
        """Keeps the error of a put that has failed."""
        self._items = [*self._waiting(), item]

    def first(self) -> QueuedPut | None:
        """The oldest one."""
        return next(iter(self._waiting()), None)

    def numbered(self, number: int) -> QueuedPut | None:
        """The put of that number, whether or not somebody was told meanwhile."""
        return next((each for each in self._items if each.number == number), None)

    def take_all(self) -> BaseException | None:
        """The oldest error, with the others as notes."""
        errors = [take_error(item) for item in self._waiting()]
        self._items = []
        for other in errors[1:]:
            errors[0].add_note(f"and another put failed: {other}")
        return errors[0] if errors else None

    def _waiting(self) -> list[QueuedPut]:
        return [item for item in self._items if not item.course.is_told]


def take_error(item: QueuedPut) -> BaseException:
    """The error of a put, which is raised now."""
    error = item.course.error
    assert error is not None
    if not item.course.is_told:
        item.course.is_told = True
        error.add_note(f"(of the earlier put of {item.course}, which nobody waited for)")
    return error
