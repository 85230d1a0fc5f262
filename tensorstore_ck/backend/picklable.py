"""A backend that can be pickled: for work in other processes, on this host or elsewhere.

The pickle contains the arguments to open it, with the credentials in `storage_options`: send it only to workers of the same user.
"""

import os
from collections.abc import Mapping
from typing import Any

from tensorstore_ck.backend import open_backend
from tensorstore_ck.backend.forwarding import ForwardingBackend
from tensorstore_ck.errors import InvalidUrlError


class PicklableBackend(ForwardingBackend):
    """A backend that is opened again when it is unpickled."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, no_sync: bool = False) -> None:
        """Opens it.

        Raises:
            InvalidUrlError: it is in this process's memory.
        """
        if url.startswith("memory:"):
            raise InvalidUrlError(f"{url} is in the memory of one process: other workers cannot reach it", object_id=url)
        where = url if "://" in url else os.path.abspath(os.path.expanduser(url))  # workers have other working directories
        self._arguments = (where, storage_options, no_sync)
        super().__init__(open_backend(where, storage_options, no_sync=no_sync))

    def __reduce__(self) -> tuple[Any, ...]:
        return PicklableBackend, self._arguments
