"""A backend that refuses every change without sending a request."""

from typing import Any, NoReturn

from tensorstore_ck.backend.forwarding import ForwardingBackend
from tensorstore_ck.errors import PermissionDeniedError


def read_only_error(what: str, url: str) -> PermissionDeniedError:
    """The error of a change to a store that was opened read-only; `what` begins the message."""
    return PermissionDeniedError(
        f"{what} is refused: the store at {url} was opened with read_only=True. Open it without that to change it", object_id=url
    )


class ReadOnlyBackend(ForwardingBackend):
    """See above."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyBackend, (self.inner,)

    def get_if_there(self, name: str, *, max_bytes: int) -> bytes | None:
        """See `Backend.get_if_there`."""
        return self.inner.get_if_there(name, max_bytes=max_bytes)

    def _refuse(self, *names: object, **_: object) -> NoReturn:
        raise read_only_error(f"a change of {names[0]}" if names and isinstance(names[0], str) else "a deletion", self.url)

    put = replace = create = sync_folders = open_writer = open_whole_writer = delete = abort_upload = _refuse
