"""Manifests of staged objects, one per rank, by which any process can upload and publish them.

The manifest of rank 0, which commits, has a `PublishingLead`: everything that the publishing log entry needs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tensorstore_ck.backend.object_names import check_name
from tensorstore_ck.backend.staging import StagingFolder
from tensorstore_ck.common.ids import DIGEST_BYTES, ULID_BYTES, Digest, Ulid, derived_hash, ulid_text
from tensorstore_ck.engine.write.publish import RankParts
from tensorstore_ck.engine.write.request import ANY, AnyHead
from tensorstore_ck.errors import CorruptObjectError, MissingObjectError, StoreError
from tensorstore_ck.format.record import decode_record
from tensorstore_ck.format.sealed import Body, pack_body, take, take_count, unpack_body

Accepts = tuple[Digest | None, ...] | AnyHead
"""The roots at which the ref may be when a staged save is published. None among them means that the ref may not exist."""

STAGED_FOLDERS: Final = ("packs/", "parts/", "snapshots/")
"""The folders of staged objects."""
VERSION: Final = 1
_CONTEXT: Final = "staging manifest"


class PublishingLead(NamedTuple):
    """The fields of the log entry that publishes."""

    record: bytes
    """The sealed record."""
    parts: Sequence[RankParts]
    """The parts of all ranks, in order."""
    accepts: Accepts
    pinned: Ulid | None
    """The published snapshot whose blocks it shares; pinned until this one is published."""
    after: Sequence[Ulid]
    """Snapshots that were staged on the ref before it, whose blocks it may share: once published, they are pinned too."""
    mark: tuple[str, str] | None
    """A mark for the snapshot, and the reason."""


class Manifest(NamedTuple):
    """The objects that one rank has staged."""

    txn: Ulid
    """The transaction of the staging; the snapshot's ULID."""
    ref: str
    step: int | None
    rank: int
    ranks: int
    names: Sequence[str]
    """The objects that must be in the store before it is published; some may be there already."""
    size_bytes: int
    """The bytes of the objects that this rank wrote."""
    lead: PublishingLead | None

    @property
    def key(self) -> str:
        """Its name in the staging folder."""
        return manifest_key(self.txn, self.rank)

    def encode(self) -> bytes:
        """``msgpack body | its hash``; not part of the store's format: only the build that wrote a staging disk reads it."""
        lead = None if self.lead is None else encode_lead(self.lead)
        packed = pack_body({"version": VERSION, **self._asdict(), "names": list(self.names), "lead": lead})
        return packed + derived_hash(_CONTEXT, packed)


def manifest_key(txn: Ulid, rank: int) -> str:
    """The name of a manifest in the staging folder."""
    return f"{ulid_text(txn)}-{rank}"


def decode_manifest(data: bytes, name: str) -> Manifest:
    """The manifest that `Manifest.encode` encoded.

    Raises:
        CorruptObjectError: it is not a manifest.
    """
    packed = memoryview(data)[:-DIGEST_BYTES]
    if derived_hash(_CONTEXT, packed) != data[-DIGEST_BYTES:]:
        raise CorruptObjectError(f"the staging manifest {name} does not match its hash: it was damaged on the disk", object_id=name)
    body = unpack_body(packed, name)
    try:
        if body["version"] != VERSION:
            raise ValueError(f"it is of version {body['version']!r}")
        names = take(body, "names", list)
        if not all(type(name) is str for name in names):
            raise TypeError("a name is not a string")
        if not all(check_name(name).startswith(STAGED_FOLDERS) for name in names):
            raise ValueError("a name is not that of a pack, part or record")
        return Manifest(
            txn=_ulid(take(body, "txn", bytes)),
            ref=take(body, "ref", str),
            step=None if body["step"] is None else take(body, "step", int),
            rank=take_count(body, "rank"),
            ranks=take_count(body, "ranks"),
            names=names,
            size_bytes=take_count(body, "size_bytes"),
            lead=None if body["lead"] is None else decode_lead(take(body, "lead", dict)),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptObjectError(f"the staging manifest {name} is malformed: {exc!r}", object_id=name) from exc


def read_manifests(folder: StagingFolder) -> tuple[list[Manifest], dict[str, StoreError]]:
    """The manifests in a folder, in the order in which they were staged; and errors of damaged ones, by key."""
    manifests, damaged = [], {}
    for key in folder.list_manifests():
        try:
            manifests.append(decode_manifest(folder.read_manifest(key), key))
        except MissingObjectError:
            continue  # published or given up meanwhile
        except StoreError as exc:
            damaged[key] = exc
    times = {manifest.txn: decode_record(manifest.lead.record, manifest.key).time_ns for manifest in manifests if manifest.lead is not None}
    order = _order(
        sorted({manifest.txn for manifest in manifests}, key=lambda txn: (times.get(txn, 0), txn)),
        {manifest.txn: manifest.lead.after for manifest in manifests if manifest.lead is not None},
    )
    return sorted(manifests, key=lambda manifest: (order[manifest.txn], manifest.rank)), damaged


def _order(by_time: list[Ulid], after: Mapping[Ulid, Sequence[Ulid]]) -> dict[Ulid, int]:
    """Sorts by time, but each manifest after those that were staged before it: a host's clock may have been set back."""
    order: dict[Ulid, int] = {}
    while by_time:
        ready = next((txn for txn in by_time if not set(by_time).intersection(after.get(txn, ()))), by_time[0])
        order[ready] = len(order)
        by_time = [txn for txn in by_time if txn != ready]
    return order


def encode_lead(lead: PublishingLead) -> Body:
    """Encodes the lead, for storage and for other ranks."""
    return {
        "record": lead.record,
        "parts": [part.record() for part in lead.parts],
        "accepts": None if isinstance(lead.accepts, AnyHead) else list(lead.accepts),
        "pinned": lead.pinned,
        "after": list(lead.after),
        "mark": None if lead.mark is None else list(lead.mark),
    }


def decode_lead(body: Body) -> PublishingLead:
    """The lead that `encode_lead` encoded.

    Raises:
        KeyError, TypeError, ValueError: it is malformed.
    """
    accepts, mark = body["accepts"], body["mark"]
    return PublishingLead(
        record=take(body, "record", bytes),
        parts=[RankParts.of_record(part) for part in take(body, "parts", list)],
        accepts=ANY if accepts is None else tuple(None if root is None else _digest(root) for root in accepts),
        pinned=None if body["pinned"] is None else _ulid(body["pinned"]),
        after=[_ulid(txn) for txn in take(body, "after", list)],
        mark=None if mark is None else (str(mark[0]), str(mark[1])),
    )


def _ulid(value: Any) -> Ulid:
    if type(value) is not bytes or len(value) != ULID_BYTES:
        raise ValueError("a ULID is malformed")
    return Ulid(value)


def _digest(value: Any) -> Digest:
    if type(value) is not bytes or len(value) != DIGEST_BYTES:
        raise ValueError("a digest is malformed")
    return Digest(value)
