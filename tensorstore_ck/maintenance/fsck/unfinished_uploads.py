"""Old unfinished writes: multipart uploads and temporaries."""

from typing import Final

from tensorstore_ck.backend.probe import PROBE_FOLDER
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.log import store_folders

STALE_SECONDS: Final = 24 * 3600
_NS: Final = 1_000_000_000


def stale_uploads(engine: Engine, older_than_seconds: int = STALE_SECONDS) -> list[str]:
    """Names of unfinished writes that are older than this."""
    before_ns = engine.clock() - older_than_seconds * _NS
    listed = engine.backend.list_uploads([*store_folders(engine.backend), PROBE_FOLDER])
    return [upload.name for upload in listed if upload.modified_ns < before_ns]


def abort_stale_uploads(engine: Engine, older_than_seconds: int = STALE_SECONDS) -> list[str]:
    """Aborts them; returns their names."""
    names = stale_uploads(engine, older_than_seconds)
    for name in names:
        engine.backend.abort_upload(name)
    return names
