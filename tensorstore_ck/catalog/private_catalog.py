"""The location of a server's own catalog: the user's cache, so that the next start reads only new entries."""

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import platformdirs

from tensorstore_ck.catalog.schema import VERSION
from tensorstore_ck.errors import PermissionDeniedError
from tensorstore_ck.log.cache.open_cache import private_folder

_UNUSED_SECONDS: Final = 30 * 24 * 3600


@contextmanager
def private_catalog(cache_dir: str | None, urls: Sequence[str]) -> Iterator[str]:
    """The path of the catalog of the stores at `urls`; in a temporary folder if the cache is not a private folder on a local disk.

    Servers with the same stores share it. A file that no server used for 30 days is removed.
    """
    base = Path(cache_dir) if cache_dir else platformdirs.user_cache_path("tensorstore_ck", appauthor=False)
    locations = sorted({url if "://" in url else os.path.abspath(url) for url in urls})
    digest = hashlib.sha256("\0".join(locations).encode()).hexdigest()
    name = f"{digest[:32]}-v{VERSION}.sqlite"
    try:
        path = private_folder(base, "catalogs") / name
        if path.exists():
            os.utime(path)
    except (OSError, PermissionDeniedError):
        with tempfile.TemporaryDirectory(prefix="tsck-catalog-") as folder:
            yield os.path.join(folder, name)
        return
    for other in path.parent.glob("*.sqlite"):
        with suppress(OSError):
            if other.stat().st_mtime < time.time() - _UNUSED_SECONDS:
                other.unlink()
    yield str(path)
