"""Old unfinished writes: multipart uploads and temporaries."""

from typing import Final

from tensorstore_ck.engine.engine import Engine

STALE_SECONDS: Final = 24 * 3600
_NS: Final = 1_000_000_000


def stale_uploads(engine: Engine, older_than_seconds: int = STALE_SECONDS) -> list[str]:
    """Names of unfinished writes that are older than this."""
    before_ns = engine.clock() - older_than_seconds * _NS
    return [upload.name for upload in engine.backend.list_uploads() if upload.modified_ns < before_ns]


def abort_stale_uploads(engine: Engine, older_than_seconds: int = STALE_SECONDS) -> list[str]:
    """Aborts them; returns their names."""
    names = stale_uploads(engine, older_than_seconds)
    for name in names:
        engine.backend.abort_upload(name)
    return names
