"""The note on a snapshot in an experiment tracker, and the pin that keeps the snapshot for as long as the note exists.

A tracker stores no tensors, only where the snapshot is: ``tsck://ROOT::STORE``, which fsspec opens too.
"""

import re
from typing import Final, NamedTuple

from tensorstore_ck.errors import InputError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.store import ReadOnlyStore, Store
from tensorstore_ck.store.internals import require_opened

Pin = bool | str | float
"""True: until it is unpinned; ``"30d"`` or seconds: for that time; False: no pin."""

_ROOT: Final = re.compile(r"[0-9a-f]{64}")
_REFERENCE: Final = re.compile(r"tsck://(?P<root>[^:/]*)::(?P<store>.*)", re.DOTALL)


class TrackedSnapshot(NamedTuple):
    """A snapshot that a tracker names."""

    store: str
    """URL, without credentials."""
    address: str
    """The root."""


def find_published(store: Store | ReadOnlyStore, snapshot: str | Snapshot) -> Snapshot:
    """The snapshot at an address, once the saves in progress of this handle have ended; or this snapshot, if it is in the store.

    Raises `NotFoundError` if it is not in the store, `StoreError` if a save in progress has failed.
    """
    require_opened(store)
    address = snapshot.root if isinstance(snapshot, Snapshot) else snapshot
    store.finish_staged(address)
    return store.resolve(address)


def pin_snapshot(store: Store | ReadOnlyStore, snapshot: Snapshot, pin: Pin, *, owner: str, reason: str) -> None:
    """Pins the snapshot, before anything refers to it. If the tracker fails afterwards, the pin stays: the note may exist.

    Raises `PermissionDeniedError` if the store was opened read-only, `InvalidOptionError` if `pin` is not a duration.
    """
    if pin is not False:
        assert isinstance(store, Store)  # `ReadOnlyStore` is for type checkers: `Store.pin` refuses it
        store.pin(snapshot.root, owner=owner, reason=reason, expires=None if pin is True else pin)


def reference_to(store: Store | ReadOnlyStore, snapshot: Snapshot) -> str:
    """The URL of a snapshot."""
    return f"tsck://{snapshot.root}::{store.url}"


def decode_reference(reference: str, where: str) -> TrackedSnapshot:
    """The snapshot that such a URL names. Raises `InputError` if it names none; the message says `where` it was found."""
    match = _REFERENCE.fullmatch(reference)
    return checked_pointer(match["store"] if match else "", match["root"] if match else "", where)


def checked_pointer(store: str, root: str, where: str) -> TrackedSnapshot:
    """The snapshot with this root. Raises `InputError` if there is no store, or no root."""
    if not store or not _ROOT.fullmatch(root):
        raise InputError(f"{where} does not name a snapshot: {root!r} in {store!r}", object_id=where)
    return TrackedSnapshot(store, root)
