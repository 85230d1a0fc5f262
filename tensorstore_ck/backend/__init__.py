"""Backends: bytes by name in a folder, in an object store or in memory, and `open_backend`, which makes one from a URL.

This is the only module that understands URLs. It loads fsspec only for URLs of remote stores, so that local commands start fast.

protocol.py               what the store needs of a backend
object_names.py           which names a backend takes
local.py                  a folder of a local or network filesystem
durable_folders.py        makes folders, and syncs what is new in one, with the folders above
local_io.py               system calls on one file; reads are tried again where a network folder lost its handle
local_modes.py            modes and group of the files and folders of a store in a folder
local_writer.py           one large local file, written by several threads; on a disk past the page cache
os_errors.py              from an `OSError` to this package's errors
s3.py                     an S3 bucket's prefix
s3_requests.py            sends S3 requests, with retries
s3_quirks.py              what some S3 servers do not support
s3_create.py              creates S3 objects, never overwriting one
s3_multipart_writer.py    one large S3 object, uploaded in pieces while it grows
s3_resumable_upload.py    one S3 object, uploaded in pieces by one process after another
resumable_upload.py       the protocol of such uploads
fsspec_backend.py         any other fsspec filesystem
wait_notices.py           reports that a request waits for a server
remote_errors.py          from an error of a remote filesystem to this package's errors
memory.py                 a backend in a dict
forwarding.py             the base of backends that wrap another one
store_backend.py          an open store: packs where they lie, the rates of reads and writes, free space
read_only.py              refuses all writes
reserve.py                space for log entries that free space, on a full disk
picklable.py              a backend for other processes
probe.py                  finds out what a backend guarantees, and how fast it is
save_duration.py         how long a save will take, measured with a part of it
"""

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.probe import ProbeResult, probe, probe_create
from tensorstore_ck.backend.protocol import Backend, Created, ObjectInfo, ObjectWriter
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.extras import missing_extra
from tensorstore_ck.errors import InvalidOptionError, InvalidUrlError, MissingExtraError
from tensorstore_ck.events import Callback, log_event
from tensorstore_ck.redaction import clean_error, display_url, secret_values

__all__ = ["Backend", "Buffer", "Created", "ObjectInfo", "ObjectWriter", "ProbeResult", "open_backend", "probe", "probe_create"]

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+._-]*)://(?P<rest>.*)", re.DOTALL)
_ALMOST_URL = re.compile(r"[^/.~][^/]*://")
_CUT_URL = re.compile(r"(?:s3a?|gs|gcs|az|abfss?|memory|file|local|https?):", re.IGNORECASE)
_NOT_IN_AZURE = re.compile(r"\\|(?:^|/)\.(?:/|$)|^[^/]*/[^/]*[\[\]:]")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}


def open_backend(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *, no_sync: bool = False, on_wait: Callback = log_event
) -> Backend:
    """The backend for a path, ``file://``, ``s3://bucket/prefix``, ``memory://name`` or another fsspec URL.

    Sends no request: the location need not exist. `no_sync` gives up local durability against power failures. `on_wait` is called with an
    event of the kind ``waiting`` when a request to a server has waited long; by default it goes to the log.

    Raises:
        InvalidUrlError: not the URL of a store, or one with a secret in it.
        InvalidOptionError: `storage_options` that the filesystem does not accept.
        MissingExtraError: the filesystem's library is not installed.
    """
    if not isinstance(url, str | os.PathLike) or not isinstance(text := os.fspath(url), str):
        raise InvalidUrlError(f"a {type(url).__name__} is not the URL of a store: give a folder, or s3://bucket/prefix, as text")
    match = _URL.fullmatch(text)
    shown = display_url(text)
    if not text or "\0" in text or "::" in text:
        raise InvalidUrlError(f"{shown!r} is not the URL of a store: give a folder, or s3://bucket/prefix", object_id=shown)
    if match is None and _ALMOST_URL.match(text):
        raise InvalidUrlError(
            f"{shown!r} is no URL, which begins with a protocol such as s3://; a folder of that name is './{shown}'", object_id=shown
        )
    if match is None and (cut := _CUT_URL.match(text)) is not None:
        raise InvalidUrlError(
            f"{shown!r} is no URL, and hardly meant as a folder: pathlib.Path and os.path.normpath drop a slash of {cut[0]}//..., so give "
            f"it as text; a folder of that name is './{shown}'",
            object_id=shown,
        )
    if match is None or match["protocol"].lower() in ("file", "local"):
        if storage_options:
            raise InvalidOptionError(f"storage_options are for remote stores, and {shown} is a local folder", object_id=shown)
        return LocalBackend(os.path.expanduser(text) if match is None else _file_path(text), sync=not no_sync)
    protocol = match["protocol"].lower()
    if shown != text:
        raise InvalidUrlError(
            f"{shown}: a store's URL must not contain a password, key, token or signature, since it is shown and stored: give secrets in "
            "storage_options (--storage-option), or in the environment or the configuration files that the service's library reads",
            object_id=shown,
        )
    return _open_remote(protocol, f"{protocol}://{match['rest']}", dict(storage_options or {}), on_wait)


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
        raise InvalidUrlError(f"{url} is not a local path: write file:///folder, with three slashes", object_id=url)
    return unquote(parts.path)


def _open_remote(protocol: str, url: str, options: dict[str, Any], on_wait: Callback) -> Backend:
    from fsspec.registry import available_protocols, get_filesystem_class  # noqa: PLC0415 - takes longer than a local command

    if protocol in ("http", "https"):
        raise InvalidUrlError(
            f"a store cannot be at {url}: a web server neither lists objects nor creates them exclusively. For an S3 service write "
            f"s3://bucket/prefix with the storage option endpoint_url={protocol}://...; copy a store's files that a web server serves "
            "to a folder (`rclone copy`) and open that",
            object_id=url,
        )
    if protocol not in available_protocols():
        known = ", ".join(sorted({"file", *_EXTRAS, "memory"}))
        raise InvalidUrlError(f"{url}: there is no protocol {protocol}://; the usual ones are {known}", object_id=url)
    try:
        filesystem_class = get_filesystem_class(protocol)
    except ImportError as exc:
        if protocol in _EXTRAS:
            raise missing_extra(_EXTRAS[protocol], f"{protocol}://") from exc
        raise MissingExtraError(f"{protocol}:// needs a library that is not installed: {exc}", object_id=protocol) from exc
    except AttributeError as exc:  # adlfs, of what it no longer supports
        raise InvalidUrlError(f"{url}: {exc}", object_id=url) from exc
    secrets = secret_values(options)
    try:
        root = filesystem_class._strip_protocol(url)
    except TypeError as exc:  # a wrapper, of another filesystem
        raise InvalidUrlError(f"a store cannot be at {url}: {protocol}:// wraps another filesystem; name that one", object_id=url) from exc
    options = {**filesystem_class._get_kwargs_from_urls(url), **options, "use_listings_cache": False, "skip_instance_cache": True}
    if not isinstance(root, str) or not root.strip("/") or (protocol in _EXTRAS and url.startswith(f"{protocol}:///")):
        raise InvalidUrlError(f"{url} has no bucket and prefix: give {protocol}://bucket/prefix", object_id=url)
    if ".." in root.split("/"):
        raise InvalidUrlError(f"{url} contains `..`; write the prefix itself", object_id=url)
    if _EXTRAS.get(protocol) == "azure" and _NOT_IN_AZURE.search(root):
        raise InvalidUrlError(
            f"a store cannot be at {url}: in Azure a prefix has no backslash, no folder `.`, and no colon or square bracket in its first "
            "folder; choose another prefix",
            object_id=url,
        )

    def connect(options: Mapping[str, Any] = options) -> Any:
        try:
            return filesystem_class(**options)
        except Exception as exc:
            clean_error(exc, secrets)
            if not isinstance(exc, TypeError | ValueError | KeyError):
                raise
            raise InvalidOptionError(f"{protocol}:// does not accept these storage_options: {exc}", object_id=url) from exc

    if _EXTRAS.get(protocol) == "s3":
        from tensorstore_ck.backend.s3 import S3Backend  # noqa: PLC0415 - loads fsspec
        from tensorstore_ck.backend.s3_requests import RetryTiming, without_retries  # noqa: PLC0415

        bucket, _, prefix = root.partition("/")
        single_shot, tries = without_retries(options)
        timing = RetryTiming(max_tries=tries)
        return S3Backend(lambda: connect(single_shot), bucket, prefix.strip("/"), timing=timing, on_wait=on_wait, secrets=secrets)
    from tensorstore_ck.backend.fsspec_backend import CREATE_CALLS, PATIENCE_SECONDS, FsspecBackend  # noqa: PLC0415 - loads fsspec

    return FsspecBackend(
        connect=connect,
        root=root,
        url=f"{protocol}://{root.lstrip('/')}",
        create_call=CREATE_CALLS.get(protocol),
        secrets=secrets,
        patience_seconds=None if protocol == "memory" else PATIENCE_SECONDS,
        on_wait=on_wait,
    )
