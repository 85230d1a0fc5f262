"""Places where packs lie besides the store's own: what a user may name, how one is opened, and the mark that tells it from any other.

The mark says which store moved packs there, and where that is. Without it a folder whose disk is not mounted would pass for an empty
place; and a copy of a store's files, which shares the packs that were moved, would free what the original needs.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast
from urllib.parse import parse_qsl

from tensorstore_ck.backend import open_backend
from tensorstore_ck.backend.cold.allowed_locations import is_allowed, is_at_store_endpoint
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.read_only import ReadOnlyBackend
from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError, MissingObjectError, PlaceUnavailableError
from tensorstore_ck.events import Callback, log_event
from tensorstore_ck.redaction import display_url

MARK_NAME: Final = "place.json"
MAX_MARK_BYTES: Final = 1 << 16
MAX_URL_CHARS: Final = 256
STORAGE_CLASSES: Final = ("STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR")
"""Of S3: those that can be read at once."""
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.+")


@dataclass(frozen=True, slots=True)
class LocationOpener:
    """Opens places: those at the store's own endpoint as the store itself was opened, others by what the environment says."""

    store_url: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    no_sync: bool = False
    read_only: bool = False
    on_wait: Callback = log_event
    """See `open_backend`. It does not travel to other processes, where the log is told."""
    allowed: tuple[str, ...] = ()
    """The places that this host allows besides those that need no word (tiers/allowed.py)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return LocationOpener, (self.store_url, self.storage_options, self.no_sync, self.read_only, log_event, self.allowed)

    def __call__(self, url: str) -> Backend:
        """The backend of a place.

        Raises:
            PlaceUnavailableError: this host does not allow it; nothing was asked of it.
        """
        if not is_allowed(url, self.store_url, self.allowed):
            raise _not_allowed(url, self.store_url)
        where, storage_class = _split(url)
        options = dict(self.storage_options) if is_at_store_endpoint(where, self.store_url) else {}
        if storage_class is not None:
            options["s3_additional_kwargs"] = {**options.get("s3_additional_kwargs", {}), "StorageClass": storage_class}
        backend = open_backend(where, options, no_sync=self.no_sync, on_wait=self.on_wait)
        return cast(Backend, ReadOnlyBackend(backend)) if self.read_only else backend


def _not_allowed(url: str, store_url: str) -> PlaceUnavailableError:
    where = url.partition("?")[0]
    return PlaceUnavailableError(
        f"the store at {store_url} names {url} as a place of packs, which this host does not allow: whoever can write to a store can name "
        f"any place, and nothing was sent there. If you know it, allow it: open(..., places=[{where!r}]), `--allow-place "
        f"{shlex.quote(where)}`, or, for all commands of this user, {where} as a line of ~/.config/tensorstore_ck/places",
        object_id=url,
    )


class OwnerMarker(NamedTuple):
    """What lies at each place."""

    store: str
    """The uuid of the store whose packs are there."""
    url: str
    """Where that store is."""


def read_mark(backend: Backend) -> OwnerMarker | None:
    """The mark of a place; None where there is none.

    Raises:
        CorruptObjectError: it is none.
    """
    try:
        data = backend.get(MARK_NAME, max_bytes=MAX_MARK_BYTES)
    except MissingObjectError:
        return None
    try:
        found = json.loads(data)
        return OwnerMarker(str(found["store"]), str(found["url"]))
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise CorruptObjectError(f"{MARK_NAME} in {backend.url} is damaged: `tsck tier --claim-locations` writes it anew") from exc


def write_mark(backend: Backend, mark: OwnerMarker) -> None:
    """Marks a place, whatever was there."""
    backend.replace(MARK_NAME, json.dumps(mark._asdict(), indent=1).encode() + b"\n")


def check_place(url: object) -> str:
    """`url`, if packs can be moved there, as far as it tells by itself.

    Raises:
        InvalidOptionError: it is neither an absolute path nor a URL; it holds a secret; or S3 cannot read its storage class at once.
    """
    if not isinstance(url, str) or not url.isprintable() or len(url) > MAX_URL_CHARS or not (os.path.isabs(url) or _URL.fullmatch(url)):
        raise InvalidOptionError(
            f"packs are moved to a URL such as s3://bucket/prefix or an absolute path, up to {MAX_URL_CHARS} characters, not to {url!r}",
            object_id="move_after",
        )
    where, _ = _split(url)
    if _URL.fullmatch(where) and display_url(where) != where:
        raise InvalidOptionError(
            "the URL of a place is kept in the store, for all to see: leave user, password, keys and signatures out, and give them to "
            "those who open the store (storage_options, or the environment)",
            object_id="move_after",
        )
    return url


def require_apart(url: str, store_url: str) -> None:
    """Checks that a place is not inside the store's own, and that it will be there for others.

    Raises:
        InvalidOptionError: it is inside, or in the memory of this process.
    """
    own, where = _normal(store_url), _normal(_split(url)[0])
    if where == own or where.startswith(f"{own}/"):
        raise InvalidOptionError(f"{url} is inside the store: name a place beside it, such as {own}-cold", object_id=url)
    if _protocol(where) == "memory" and _protocol(own) != "memory":
        raise InvalidOptionError(f"{url} is in the memory of one process: what was moved there would be lost with it", object_id=url)


def place_url(url: str, store_uuid: str) -> str:
    """The place of one store below a URL that several may use."""
    where, storage_class = _split(url)
    return f"{where.rstrip('/')}/{store_uuid}" + ("" if storage_class is None else f"?storage_class={storage_class}")


def _split(url: str) -> tuple[str, str | None]:
    """(where, storage class)."""
    where, question, query = url.partition("?")
    if not question or _protocol(where) == "file":
        return url, None
    said = dict(parse_qsl(query, keep_blank_values=True)) if _protocol(where) == "s3" else {}
    if list(said) != ["storage_class"] or said["storage_class"] not in STORAGE_CLASSES:
        raise InvalidOptionError(
            f"{where}: only of s3:// a ? may follow, with storage_class=, one of {', '.join(STORAGE_CLASSES)}: what lies in others "
            "cannot be read at once",
            object_id=where,
        )
    return where, said["storage_class"]


def _normal(url: str) -> str:
    protocol = _protocol(url)
    path = url.partition("://")[2] if _URL.fullmatch(url) else url
    return os.path.realpath(path) if protocol == "file" else f"{protocol}://{path.rstrip('/')}"


def _protocol(url: str) -> str:
    match = _URL.fullmatch(url)
    protocol = match[1].lower() if match is not None else "memory" if url.startswith("memory:") else "file"
    return {"local": "file", "s3a": "s3"}.get(protocol, protocol)
