"""The backend of a put that is staged: what it writes lies in the folder until it is uploaded; all else is the store's."""

from typing import Any

from tensorstore_ck.backend.protocol import Backend, ObjectWriter
from tensorstore_ck.backend.staging.folder import StagingFolder
from tensorstore_ck.common.buffers import Buffer


class StagingWriteBackend:
    """A `Backend`. What is not here is that of the store, read through the folder."""

    is_local = True

    def __init__(self, folder: StagingFolder, backend: Backend) -> None:
        self._folder = folder
        self._backend = backend
        self.names: list[str] = []
        """What was written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def put(self, name: str, data: Buffer) -> None:
        """Writes a small object."""
        self.names.append(name)
        self._folder.unsent.put(name, data)

    def open_writer(self, name: str) -> ObjectWriter:
        """Begins a large object."""
        self.names.append(name)
        return self._folder.unsent.open_writer(name)
