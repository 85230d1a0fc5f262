"""The user's trust file: which public keys a ref must be signed with. It lies outside the store, which its writers could change.

::

    revoked = ["ed25519:..."]          # keys that count nowhere any more

    [[trust]]
    refs = ["models/*"]                # branches and tags; the first table that matches counts
    keys = ["ed25519:...", "ed25519:..."]
"""

import os
import stat
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

import platformdirs

from tensorstore_ck.common.foreign_text import MAX_TOML_BYTES, parse_toml
from tensorstore_ck.common.owned_files import require_safe_parent
from tensorstore_ck.common.signing_keys import parse_public
from tensorstore_ck.errors import InvalidOptionError, PermissionDeniedError
from tensorstore_ck.log.field_checks import is_ref_glob

_MAX_LINKS: Final = 40


class TrustRule(NamedTuple):
    """Which keys may sign the refs that match."""

    globs: tuple[str, ...]
    keys: frozenset[bytes]


class TrustFile(NamedTuple):
    """What the file says."""

    path: str
    rules: tuple[TrustRule, ...]
    revoked: frozenset[bytes]

    def keys_of(self, ref: str) -> frozenset[bytes] | None:
        """The keys that may sign a ref; None: it needs no signature."""
        return next((rule.keys for rule in self.rules if any(fnmatchcase(ref, glob) for glob in rule.globs)), None)


def trust_path() -> Path:
    """Where a user's trust file is: by default ``~/.config/tensorstore_ck/trust.toml``."""
    return platformdirs.user_config_path("tensorstore_ck", appauthor=False) / "trust.toml"


def read_trust(path: str | os.PathLike[str] | None) -> TrustFile | None:
    """The trust file at `path`, by default the user's own, if there is one.

    Raises:
        InvalidOptionError: the file that was named is not there, or it is no trust file.
        PermissionDeniedError: it cannot be read, or other users of the host may change or replace it.
    """
    shown = str(path or trust_path())
    try:
        status, data = _read_own(shown)
    except OSError as exc:
        if path is None and not os.path.lexists(shown):  # nor if it lies in a home that this user cannot look into, as in containers
            return None
        if isinstance(exc, FileNotFoundError | NotADirectoryError):
            raise InvalidOptionError(f"there is no trust file {shown}", object_id=shown) from None
        raise PermissionDeniedError(f"the trust file {shown} cannot be read: {exc.strerror}", object_id=shown) from exc
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionDeniedError(
            f"the trust file {shown} can be changed by other users of this host: it must be yours or root's, and `chmod go-w` it",
            object_id=shown,
        )
    if not stat.S_ISREG(status.st_mode) or len(data) > MAX_TOML_BYTES:
        raise InvalidOptionError(f"{shown} is no trust file: it is not a regular file of at most {MAX_TOML_BYTES:,} bytes", object_id=shown)
    try:
        return _decode(shown, parse_toml(data))
    except ValueError as exc:
        raise InvalidOptionError(f"{shown} is no trust file: {exc}", object_id=shown) from exc


def _read_own(path: str) -> tuple[os.stat_result, bytes]:
    """The file that `path` leads to: its status, and what it has up to one byte more than it may have.

    Raises:
        PermissionDeniedError: another user of this host can replace it, or a link on the way to it, or made such a link.
        OSError: it cannot be read.
    """
    at = os.path.abspath(path)
    for _ in range(_MAX_LINKS):
        status = os.lstat(at)
        folder = os.path.dirname(at)
        if not os.statvfs(folder).f_flag & os.ST_RDONLY:  # as the volume of a ConfigMap is, whose folder has mode 0777
            require_safe_parent(folder)
        if not stat.S_ISLNK(status.st_mode):
            break
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionDeniedError(f"the trust file {at} is a link that user {status.st_uid} made: name the file itself", object_id=at)
        at = os.path.abspath(os.path.join(os.path.dirname(at), os.readlink(at)))
    with open(os.open(at, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # opening a FIFO would wait
        status = os.fstat(file.fileno())
        return status, file.read(MAX_TOML_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""


def _decode(path: str, body: dict[str, Any]) -> TrustFile:
    _require_names("the file", body, {"revoked", "trust"})
    tables = body.get("trust", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError("`trust` is a list of tables: write [[trust]]")
    return TrustFile(path, tuple(map(_rule, tables)), _keys("revoked", body.get("revoked", [])))


def _rule(table: dict[str, Any]) -> TrustRule:
    _require_names("[[trust]]", table, {"refs", "keys"})
    globs = table.get("refs")
    if not isinstance(globs, list) or not globs or not all(isinstance(glob, str) and is_ref_glob(glob) for glob in globs):
        raise ValueError(f'`refs` is a list of globs over refs, such as ["models/*"], not {globs!r:.80}')
    return TrustRule(tuple(globs), _keys("keys", table.get("keys")))


def _keys(name: str, values: object) -> frozenset[bytes]:
    if not isinstance(values, list):
        raise ValueError(f"`{name}` is a list of public keys, not {values!r:.80}")
    return frozenset(map(parse_public, values))


def _require_names(where: str, table: dict[str, Any], known: Sequence[str] | set[str]) -> None:
    unknown = sorted(table.keys() - set(known))
    if unknown:
        raise ValueError(f"{where} has an unknown name {unknown[0]!r:.80}: it may have {' and '.join(sorted(known))}")
