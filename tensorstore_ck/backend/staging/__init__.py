"""The tier below a put: a local folder where objects are durable first, their way to the store, and reads through both.

options.py        Staging: what a user says about it
folder.py         StagingFolder: what lies in the folder, how large it may be, what is evicted
takeover.py       another user's folder, made root's for a while
copies.py         what the store has as well: a read cache of whole and sparse files
journal.py        how far each upload came
uploader.py       Uploader: from the folder to the store, resumable, retried, paced
uploadround.py    one pass over objects, by several threads
tieredbackend.py  TieredBackend: reads through the folder
stagingwrites.py  StagingWrites: writes into it
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
