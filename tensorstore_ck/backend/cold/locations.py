"""Cold locations, where packs lie outside the store: what a user may name, and how one is opened."""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl

from tensorstore_ck.backend import open_backend
from tensorstore_ck.backend.cold.allowed_locations import is_allowed, is_at_store_endpoint, places_file
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.read_only import ReadOnlyBackend
from tensorstore_ck.errors import InvalidOptionError, PlaceUnavailableError
from tensorstore_ck.events import Callback, log_event
from tensorstore_ck.redaction import display_url

MAX_URL_CHARS: Final = 256
STORAGE_CLASSES: Final = ("STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR")
"""The storage classes of S3 whose objects can be read at once."""
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.+")


@dataclass(frozen=True, slots=True)
class LocationOpener:
    """Opens locations. Those at the store's own endpoint get the store's options, others those of the environment."""

    store_url: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    no_sync: bool = False
    read_only: bool = False
    on_wait: Callback = log_event
    """See `open_backend`. It is not pickled: in other processes events go to the log."""
    allowed: tuple[str, ...] = ()
    """The locations that this host allows besides those allowed by default (`allowed_locations`)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return LocationOpener, (self.store_url, self.storage_options, self.no_sync, self.read_only, log_event, self.allowed)

    def __call__(self, url: str) -> Backend:
        """The backend of a location.

        Raises:
            PlaceUnavailableError: this host does not allow it; no request was sent.
        """
        if not is_allowed(url, self.store_url, self.allowed):
            raise _not_allowed(url, self.store_url)
        where, storage_class = _split(url)
        options = dict(self.storage_options) if is_at_store_endpoint(where, self.store_url) else {}
        if storage_class is not None:
            options["s3_additional_kwargs"] = {**options.get("s3_additional_kwargs", {}), "StorageClass": storage_class}
        backend = open_backend(where, options, no_sync=self.no_sync, on_wait=self.on_wait)
        if isinstance(backend, LocalBackend) and os.path.isabs(self.store_url):
            backend.share_like(self.store_url)  # whoever may use the store needs its packs there
        return ReadOnlyBackend(backend) if self.read_only else backend


def _not_allowed(url: str, store_url: str) -> PlaceUnavailableError:
    where = url.partition("?")[0]
    return PlaceUnavailableError(
        f"the store at {store_url} names {url} as a location of packs, which this host does not allow: any writer of a store can name any "
        f"location, so nothing was sent there. If you trust it, allow it: open(..., places=[{where!r}]), `--allow-place "
        f"{shlex.quote(where)}`, or, for all commands of this user, {where} as a line of {places_file()}",
        object_id=url,
    )


def check_location(url: object) -> str:
    """`url`, if it is a valid cold location.

    Raises:
        InvalidOptionError: neither an absolute path nor a URL; with a secret; or of a storage class that S3 cannot read at once.
    """
    if not isinstance(url, str) or not url.isprintable() or len(url) > MAX_URL_CHARS or not (os.path.isabs(url) or _URL.fullmatch(url)):
        raise InvalidOptionError(
            f"packs are moved to a URL such as s3://bucket/prefix or an absolute path, up to {MAX_URL_CHARS} characters, not to {url!r}",
            object_id="move_after",
        )
    where, _ = _split(url)
    if _URL.fullmatch(where) and display_url(where) != where:
        raise InvalidOptionError(
            "the URL of a location is stored for all to see: leave user, password, keys and signatures out, and give them when opening "
            "the store (storage_options, or the environment)",
            object_id="move_after",
        )
    return url


def require_outside_store(url: str, store_url: str) -> None:
    """Checks that a location is outside the store, and reachable by other processes.

    Raises:
        InvalidOptionError: it is inside, or in the memory of this process.
    """
    own, where = _normal(store_url), _normal(_split(url)[0])
    if where == own or where.startswith(f"{own}/"):
        raise InvalidOptionError(f"{url} is inside the store: name a location outside of it, such as {own}-cold", object_id=url)
    if _protocol(where) == "memory" and _protocol(own) != "memory":
        raise InvalidOptionError(f"{url} is in the memory of one process: packs moved there would be lost with it", object_id=url)


def store_location(url: str, store_uuid: str) -> str:
    """The location of one store below a URL that several stores may use."""
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
            f"{where}: only s3:// URLs may have a ?, with storage_class=, one of {', '.join(STORAGE_CLASSES)}: objects of other classes "
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
