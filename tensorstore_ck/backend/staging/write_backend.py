"""The backend of a staged save: its writes go to the folder, from where they are uploaded; everything else to the store."""

from typing import Any

from tensorstore_ck.backend.protocol import Backend, ObjectWriter
from tensorstore_ck.backend.staging.folder import StagingFolder
from tensorstore_ck.common.buffers import Buffer


class StagingWriteBackend:
    """A `Backend`. All other attributes are those of `backend`, the store read through the folder."""

    is_local = True

    def __init__(self, folder: StagingFolder, backend: Backend) -> None:
        self._folder = folder
        self._backend = backend
        self.names: list[str] = []
        """The written objects."""

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
