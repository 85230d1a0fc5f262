"""Which cache of this host belongs to a remote store, so that names can be completed without asking the store.

A small file in the cache's folder, named by a hash of the URL and its options. It is written when a command opens the store, and may be
lost or wrong: it is used for completion alone. The folder is this user's alone: the cache's folder may be one where others can write.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import platformdirs

from tensorstore_ck.common.owned_files import FILE_MODE
from tensorstore_ck.common.private_folder import PrivateFolder
from tensorstore_ck.common.replace_file import replace_file_in
from tensorstore_ck.errors import PermissionDeniedError

_MAX_KEY_BYTES: Final = 200
_KEY: Final = re.compile(f"[0-9A-Za-z-]{{1,{_MAX_KEY_BYTES}}}")


def note_store(url: str, options: Mapping[str, Any], cache_dir: str | None, key: str) -> None:
    """Notes the key of the cache of a store; for a local store nothing, as its own configuration has it."""
    if not is_remote(url) or find_key(url, options, cache_dir) == key:
        return
    with suppress(OSError, PermissionDeniedError), closing(_folder(cache_dir)) as folder:
        replace_file_in(folder.make(), _name(url, options), key.encode("ascii"), mode=FILE_MODE)


def find_key(url: str, options: Mapping[str, Any], cache_dir: str | None) -> str | None:
    """The key that `note_store` noted, if any."""
    with suppress(OSError, ValueError, PermissionDeniedError), closing(_folder(cache_dir)) as folder:
        with open(os.open(_name(url, options), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd()), "rb") as file:
            key = file.read(_MAX_KEY_BYTES + 1).decode("ascii")
        return key if _KEY.fullmatch(key) else None
    return None


def is_remote(url: str) -> bool:
    """Whether reading the store takes a network."""
    return "://" in url and not url.startswith(("file://", "memory://"))


def _folder(cache_dir: str | None) -> PrivateFolder:
    base = platformdirs.user_cache_path("tensorstore_ck", appauthor=False) if cache_dir is None else Path(cache_dir)
    return PrivateFolder(os.path.abspath(base / "known"))


def _name(url: str, options: Mapping[str, Any]) -> str:
    what = json.dumps([url.rstrip("/"), options], sort_keys=True, default=str)
    return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
