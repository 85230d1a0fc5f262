"""Which cache of this host belongs to a remote store, so that names can be completed without asking the store.

A small file in the cache's folder, named by a hash of the URL and its options. It is written when a command opens the store, and may be
lost or wrong: it is used for completion alone.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import platformdirs

_KEY: Final = re.compile(r"[0-9A-Za-z-]{1,200}")


def note_store(url: str, options: Mapping[str, Any], cache_dir: str | None, key: str) -> None:
    """Notes the key of the cache of a store; for a local store nothing, as its own configuration has it."""
    if not is_remote(url) or find_key(url, options, cache_dir) == key:
        return
    path = _path(url, options, cache_dir)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(key, encoding="ascii")
        temporary.replace(path)


def find_key(url: str, options: Mapping[str, Any], cache_dir: str | None) -> str | None:
    """What `note_store` noted, if anything."""
    with suppress(OSError, ValueError):
        key = _path(url, options, cache_dir).read_text(encoding="ascii")
        return key if _KEY.fullmatch(key) else None
    return None


def is_remote(url: str) -> bool:
    """Whether reading the store takes a network."""
    return "://" in url and not url.startswith(("file://", "memory://"))


def _path(url: str, options: Mapping[str, Any], cache_dir: str | None) -> Path:
    base = platformdirs.user_cache_path("tensorstore_ck", appauthor=False) if cache_dir is None else Path(cache_dir)
    what = json.dumps([url.rstrip("/"), options], sort_keys=True, default=str)
    return base / "known" / hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
