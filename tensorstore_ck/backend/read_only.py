"""A backend that refuses every change without sending a request."""

from typing import Any, NoReturn

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.errors import PermissionDeniedError


def read_only_error(what: str, url: str) -> PermissionDeniedError:
    """The error of a change to a store that was opened read-only; `what` begins the message."""
    return PermissionDeniedError(
        f"{what} is refused: the store at {url} was opened with read_only=True. Open it without that to change it", object_id=url
    )


class ReadOnlyBackend:
    """See above. All other attributes are the inner backend's."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyBackend, (self._inner,)

    def _refuse(self, *names: object, **_: object) -> NoReturn:
        raise read_only_error(f"a change of {names[0]}" if names and isinstance(names[0], str) else "a deletion", self._inner.url)

    put = replace = create = sync_folders = open_writer = open_whole_writer = delete = abort_upload = _refuse
