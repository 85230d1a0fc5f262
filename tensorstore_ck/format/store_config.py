"""store.json: the store's configuration. `init` writes it once (salvage replaces it offline); every open reads it.

It is JSON with sorted keys, so that people can read it, and has a checksum over its other keys.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.ids import derived_hash
from tensorstore_ck.errors import CorruptObjectError, FormatVersionError

CONFIG_NAME: Final = "store.json"
MAX_CONFIG_BYTES: Final = 65536
STORE_FORMAT: Final = 1
BLOCK_BYTES: Final = 4 << 20
"""Target size of a block."""
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LOG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The content of store.json."""

    format: int
    uuid: str
    block_bytes: int
    hash: str
    """``blake3``; a keyed hash would be named here."""
    features: tuple[str, ...]
    """Format features that a reader must know; this build knows none."""
    log: str
    """Prefix of the current log; salvage starts a new one."""
    exclusive_create: bool
    """Whether the backend creates objects exclusively, as `init` tested; without it only one process may write."""

    def encode(self) -> bytes:
        """The bytes of store.json."""
        body = asdict(self)
        return _dump({**body, "checksum": _checksum(body)})


def new_config(*, exclusive_create: bool) -> StoreConfig:
    """The configuration of a new store."""
    return StoreConfig(
        format=STORE_FORMAT,
        uuid=str(uuid.uuid4()),
        block_bytes=BLOCK_BYTES,
        hash="blake3",
        features=(),
        log="log",
        exclusive_create=exclusive_create,
    )


def decode_config(data: bytes, url: str) -> StoreConfig:
    """Decodes store.json.

    Raises:
        CorruptObjectError: the JSON is damaged, or has impossible values.
        FormatVersionError: a newer format, or features that this build does not know.
    """
    where = f"{CONFIG_NAME} in {url}"
    try:
        body: dict[str, Any] = parse_json(data)
        seen = body["format"], body["hash"], body["features"]
        checksum = body.pop("checksum")
        is_sound = checksum == _checksum(body) and data == _dump({**body, "checksum": checksum})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise CorruptObjectError(f"{where} is damaged ({exc!r:.200}); run `tsck fsck`", object_id=CONFIG_NAME) from exc
    if not is_sound:
        raise CorruptObjectError(f"{where} does not match its checksum; run `tsck fsck`", object_id=CONFIG_NAME)
    if seen != (STORE_FORMAT, "blake3", []):
        raise FormatVersionError(
            f"{where} has format {seen[0]!r:.40}, hash {seen[1]!r:.40}, features {seen[2]!r:.200}; "
            f"this build reads format {STORE_FORMAT} with blake3 and no features: upgrade tensorstore_ck",
            object_id=CONFIG_NAME,
        )
    if not all(is_valid(body.get(key)) for key, is_valid in _CHECKS.items()):
        raise CorruptObjectError(f"{where} has impossible values; run `tsck fsck`", object_id=CONFIG_NAME)
    return StoreConfig(
        format=STORE_FORMAT,
        uuid=body["uuid"],
        block_bytes=body["block_bytes"],
        hash="blake3",
        features=(),
        log=body["log"],
        exclusive_create=body["exclusive_create"],
    )


_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "format": lambda value: type(value) is int,
    "uuid": lambda value: type(value) is str and bool(_UUID.fullmatch(value)),
    "block_bytes": lambda value: type(value) is int and 4096 <= value <= 64 << 20,
    "log": lambda value: type(value) is str and bool(_LOG.fullmatch(value)),
    "exclusive_create": lambda value: type(value) is bool,
}


def _checksum(body: dict[str, Any]) -> str:
    return derived_hash("store.json", _dump(body)).hex()


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, indent=1).encode() + b"\n"
