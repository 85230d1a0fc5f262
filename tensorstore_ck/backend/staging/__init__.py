"""A local folder where objects are durable first, their upload to the store, and reads through both.

options.py                `Staging`: what a user configures
folder.py                 `StagingFolder`: what lies in the folder, how large it may be, what is evicted
unsent_file.py            `UnsentFile`: one unpublished object, whose bytes are verified as they are read
folder_lock.py            who uses the folder
claims.py                 which process publishes which staged save
take_over.py              another user's folder, made root's for a while
sparse_files.py           a read cache of objects that the store has, in whole and sparse files
upload_journal.py         how far each upload came
uploader.py               `Uploader`: from the folder to the store, resumable, retried, rate-limited
upload_pass.py            one pass over unsent objects, by several threads
read_through_backend.py   `ReadThroughBackend`: reads through the folder
write_backend.py          `StagingWriteBackend`: writes into the folder
"""

from typing import NamedTuple

from tensorstore_ck.backend.staging.folder import StagingFolder
from tensorstore_ck.backend.staging.options import Staging
from tensorstore_ck.backend.staging.read_through_backend import ReadThroughBackend
from tensorstore_ck.backend.staging.uploader import Uploader
from tensorstore_ck.backend.staging.write_backend import StagingWriteBackend


class StagingTier(NamedTuple):
    """The staging tier of an open store."""

    folder: StagingFolder
    uploader: Uploader
    backend: ReadThroughBackend
    options: Staging


__all__ = ["ReadThroughBackend", "Staging", "StagingFolder", "StagingTier", "StagingWriteBackend", "Uploader"]
