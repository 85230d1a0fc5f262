"""Errors of puts beside the training that nobody was told of yet: each is kept until it was raised to somebody."""

from tensorstore_ck.session.save.queued_put import QueuedPut


class UnraisedErrors:
    """The puts that failed, and whose errors nobody has seen, oldest first. The caller locks."""

    def __init__(self) -> None:
        self._failed: list[QueuedPut] = []

    def add(self, queued: QueuedPut) -> None:
        """Keeps the error of a put that has failed."""
        self._failed = [*self._waiting(), queued]

    def first(self) -> QueuedPut | None:
        """The oldest one."""
        return next(iter(self._waiting()), None)

    def numbered(self, number: int) -> QueuedPut | None:
        """The put of that number, whether or not somebody was told meanwhile."""
        return next((each for each in self._failed if each.number == number), None)

    def take_all(self) -> BaseException | None:
        """The oldest error, with the others as notes."""
        errors = [pop_error(queued) for queued in self._waiting()]
        self._failed = []
        for other in errors[1:]:
            errors[0].add_note(f"and another put failed: {other}")
        return errors[0] if errors else None

    def _waiting(self) -> list[QueuedPut]:
        return [queued for queued in self._failed if not queued.status.is_raised]


def pop_error(queued: QueuedPut) -> BaseException:
    """The error of a put, which is raised now."""
    error = queued.status.error
    assert error is not None
    if not queued.status.is_raised:
        queued.status.is_raised = True
        error.add_note(f"(of the earlier put of {queued.status}, which nobody waited for)")
    return error
