"""The user's options of a staging disk."""

import os
from dataclasses import dataclass

from tensorstore_ck.backend.staging.folder import StagingFolder
from tensorstore_ck.backend.staging.unsent_file import OpenVerifier
from tensorstore_ck.common.free_space import MinFree
from tensorstore_ck.common.local_path import local_path
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError


@short_errors
@dataclass(frozen=True, slots=True)
class Staging:
    """A disk of this host where snapshots are durable before they are uploaded. A path alone means the defaults."""

    path: str | os.PathLike[str]
    """A folder that the host's ranks and jobs share; never on a network filesystem."""
    capacity: int | str = "80%"
    """How much it may use: bytes, ``"500GB"``, or a part of the space that is free at `tensorstore_ck.open`."""
    max_parallel_requests: int = 4
    """Parallel uploads of this process; each takes up to 32 MiB of memory."""
    stagger_seconds: float = 0.0
    """The uploads of ranks and jobs begin at random moments within this time."""
    replicate_to_peers: int = 0
    """The number of other hosts whose staging disks also keep each rank's staged files until they are published. To keep them in memory,
    name a tmpfs as `path` on all hosts."""

    def open(self, store_uuid: str, open_verifier: OpenVerifier) -> StagingFolder:
        """The folder of one store, made and checked. `open_verifier`: see `StagingFolder`.

        Raises:
            InvalidOptionError, PermissionDeniedError, NoSpaceError: it cannot be used.
        """
        if self.stagger_seconds < 0:
            raise InvalidOptionError(f"stagger_seconds must not be negative, and is {self.stagger_seconds}", object_id="staging")
        folder = StagingFolder(local_path(self.path, "staging"), store_uuid, 1, open_verifier)
        space = folder.space()
        if space is None and MinFree.parse(self.capacity).fraction:
            raise InvalidOptionError(
                f"the filesystem of {self.path} does not say how large it is: give capacity= in bytes, such as '500GB'", object_id="staging"
            )
        available = folder.used_bytes() + (space.free_bytes if space is not None else 0)
        folder.capacity_bytes = MinFree.parse(self.capacity).of(available) or 1
        folder.check()
        return folder
