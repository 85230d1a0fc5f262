"""A snapshot: the row of the ref table, and what users see of it."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tensorstore_ck.common.html_table import html_table
from tensorstore_ck.common.ids import SHOWN_ROOT_DIGITS, Digest, Ulid, ulid_text
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import SnapshotMarkedBadError
from tensorstore_ck.format.attributes import Attributes
from tensorstore_ck.format.record import Record
from tensorstore_ck.format.sealed import object_hash
from tensorstore_ck.log.field_checks import ATTRIBUTES, COUNT, EPOCH, TRIGGERS
from tensorstore_ck.redaction import one_line

if TYPE_CHECKING:
    from tensorstore_ck.log.ref_table import RefTable

COLUMNS: Final = ("root", "ref", "step", "time (UTC)", "size", "new", "mark")
"""The columns of tables of snapshots: see `Snapshot.cells`."""


class SnapshotRow(NamedTuple):
    """The row of a published or staged snapshot; users get it as a `Snapshot`."""

    ulid: Ulid
    root: Digest
    record: Digest
    """The hash of its sealed record."""
    parent: Digest | None
    ref: str
    """The branch that it was saved to."""
    step: int | None
    n: int
    """The entry that published or staged it."""
    time_ns: int
    """When it was made, never later than `arrived_ns`. Retention computes ages from it."""
    metrics: Mapping[str, float]
    """With those added later."""
    logical_bytes: int
    new_bytes: int
    arrived_ns: int = 0
    """When it was published or staged here."""
    triggers: Sequence[str] = ()
    """The names of the triggers that caused the save."""
    epoch: float | None = None
    """How many epochs the training had completed."""
    attributes: Attributes | None = None
    """What conditions compare besides fields and metrics, if there is any."""
    duration_ns: int | None = None
    """How long the save took."""
    mark: str = ""
    reason: str = ""

    @classmethod
    def of_op(cls, op: Mapping[str, Any], n: int, time_ns: int) -> "SnapshotRow":
        """The snapshot that entry `n`, of that time, publishes or stages with the fields of an operation."""
        at = (op["snapshot"], op["root"], op["record"], op["parent"], op["ref"], op["step"], n)
        optional: tuple[Any, ...] = tuple(map(op.get, ("made_ns", "triggers", "epoch", "attributes", "duration_ns")))  # any may be missing
        made_ns, triggers, epoch, attributes, duration_ns = optional
        return cls(
            *at,
            min(made_ns, time_ns) if COUNT.accepts(made_ns) else time_ns,
            *(op["metrics"], op["logical_bytes"], op["new_bytes"]),
            arrived_ns=time_ns,
            triggers=triggers if triggers and TRIGGERS.accepts(triggers) else [],
            epoch=epoch if epoch is not None and EPOCH.accepts(epoch) else None,
            attributes=attributes if attributes and ATTRIBUTES.accepts(attributes) else None,
            duration_ns=duration_ns if duration_ns is not None and COUNT.accepts(duration_ns) else None,
        )

    @classmethod
    def of_record(cls, ulid: Ulid, record: Record, sealed: bytes) -> "SnapshotRow":
        """The snapshot of a record that no entry names; `sealed`: the record's bytes."""
        at = (ulid, record.root(), object_hash(sealed), record.parent, record.ref, record.step, 0, record.time_ns)
        sizes = (record.metrics, record.logical_bytes, record.new_bytes)
        made = cls(*at, *sizes, arrived_ns=record.time_ns)
        return made._replace(triggers=record.triggers, epoch=record.epoch, attributes=record.attributes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One published snapshot."""

    root: str
    """The Merkle root, 64 hex digits: the same content, step, parent and metadata have the same root on any store."""
    id: str
    """The ULID of its record."""
    ref: str
    """The ref that it was saved to."""
    step: int | None
    time_ns: int
    """When it was made: nanoseconds since 1970, by the clock of the host that saved it. Of an import: the time of its newest file."""
    parent: str | None
    metrics: Mapping[str, float]
    mark: str
    """``bad``, or empty."""
    reason: str
    logical_bytes: int
    """Bytes of its tensors and large values."""
    new_bytes: int
    """Bytes that it added to the store."""
    entry: int
    """The log entry that published it."""
    arrived_ns: int = 0
    """When it arrived in this store: later than `time_ns` for a copy, an import and a staged save."""
    triggers: tuple[str, ...] = ()
    """The names of the triggers that caused the save, such as ``every_steps``: see the policy `keep_triggers`."""
    epoch: float | None = None
    """How many epochs the training had completed, if the save said so."""
    attributes: Mapping[str, float | str] = field(default_factory=dict)
    """What conditions compare besides these fields and `metrics`: what the save passed as ``attributes=``, and scalars of its metadata."""
    duration_ns: int | None = None
    """How long the save took, by the clock of the host that published it."""

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        mark = f", {one_line(self.mark)}" if self.mark else ""
        return f"Snapshot({self.root[:SHOWN_ROOT_DIGITS]}, {one_line(self.ref)}{step}, {self.time:%Y-%m-%d %H:%M:%S} UTC{mark})"

    def _repr_html_(self) -> str:
        metrics = ((f"metric {name}", f"{value:.6g}") for name, value in sorted(self.metrics.items()))
        return html_table("Snapshot", ("", ""), [*zip(COLUMNS, self.cells(), strict=True), *metrics])

    def cells(self) -> tuple[object, ...]:
        """A row of a table, under `COLUMNS`."""
        root, time = self.root[:SHOWN_ROOT_DIGITS], f"{self.time:%Y-%m-%d %H:%M:%S}"
        return root, self.ref, self.step, time, human_bytes(self.logical_bytes), human_bytes(self.new_bytes), self.mark

    @property
    def time(self) -> datetime:
        """When it was made, in UTC: `time_ns`, in whole microseconds."""
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=self.time_ns // 1000)

    @classmethod
    def from_info(cls, info: SnapshotRow) -> "Snapshot":
        """The public form of a row of the ref table."""
        return cls(
            root=info.root.hex(),
            id=ulid_text(info.ulid),
            ref=info.ref,
            step=info.step,
            time_ns=info.time_ns,
            parent=info.parent.hex() if info.parent else None,
            metrics=dict(info.metrics),
            mark=info.mark,
            reason=info.reason,
            logical_bytes=info.logical_bytes,
            new_bytes=info.new_bytes,
            entry=info.n,
            arrived_ns=info.arrived_ns,
            triggers=tuple(info.triggers),
            epoch=info.epoch,
            attributes=dict(info.attributes or {}),
            duration_ns=info.duration_ns,
        )


def job_of(ref: str) -> str:
    """``gpt-7b`` of ``runs/gpt-7b``: a branch's name without its first folder."""
    return ref.partition("/")[2] or ref


def searchable(snapshot: Snapshot | SnapshotRow) -> dict[str, float | str]:
    """The values by name that a condition compares besides fields and metrics: attributes, and why and how fast it was saved."""
    found = dict(snapshot.attributes or {})
    if snapshot.triggers:
        found["triggers"] = ",".join(snapshot.triggers)
    if snapshot.epoch is not None:
        found["epoch"] = snapshot.epoch
    if snapshot.duration_ns is not None:
        found["save_seconds"] = snapshot.duration_ns / 1e9
    return found


def refuse_marked(snapshot: Snapshot, address: str, advice: str) -> None:
    """Rejects a snapshot that a user or `tsck fsck --repair` marked. Only warns if it is complete and its replicas differed.

    Raises:
        SnapshotMarkedBadError: it is marked.
    """
    if snapshot.mark == "drift":
        warnings.warn(
            f"{address!r} ({snapshot.root[:16]}, step {snapshot.step}) is marked drift: {one_line(snapshot.reason)}",
            stacklevel=user_stacklevel(),
        )
    elif snapshot.mark:
        raise SnapshotMarkedBadError(
            f"{address!r} ({snapshot.root[:16]}, step {snapshot.step}) is marked {snapshot.mark}: {snapshot.reason or 'no reason given'}. "
            f"Take an earlier one (see `tsck log`), or {advice}",
            object_id=address,
        )


@dataclass(frozen=True, slots=True)
class PinnedSnapshot:
    """A pin and its snapshot."""

    snapshot: Snapshot
    owner: str
    reason: str
    expires_ns: int | None
    time_ns: int


def pinned_snapshots(view: "RefTable") -> tuple[PinnedSnapshot, ...]:
    """Every pin, by snapshot."""
    pins = ((view.snapshot(pin.ulid), pin) for pin in view.pins())
    return tuple(
        PinnedSnapshot(Snapshot.from_info(info), pin.owner, pin.reason, pin.expires_ns, time_ns=pin.time_ns)
        for info, pin in pins
        if info is not None
    )


def pinned_with_root(view: "RefTable", info: SnapshotRow, owner: str) -> list[Ulid]:
    """The snapshots with the root of `info` that `owner` has pinned (content that was saved twice has two); without any, `info` itself."""
    pinned = ((view.snapshot(pin.ulid), pin.owner) for pin in view.pins())
    return [other.ulid for other, name in pinned if other is not None and other.root == info.root and name == owner] or [info.ulid]


@dataclass(frozen=True, slots=True)
class GroupCost:
    """The size of the tensors whose names share the part before the first dot."""

    name: str
    raw_bytes: int
    stored_bytes: int
    """Stored bytes of their distinct blocks, without delta bases."""
    codecs: Mapping[str, int]
    """Codec -> raw bytes of the distinct blocks that it encodes."""


@dataclass(frozen=True, slots=True)
class SnapshotDetails:
    """A snapshot with the contents of its record and layout."""

    snapshot: Snapshot
    metadata: Mapping[str, Any]
    ranks: int
    """How many saved it together."""
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]
    """(name, dtype, shape, bytes) of each."""
    values: Mapping[str, Any]
    """Path -> value, for display; large ones as type and size."""
    stored_bytes: int
    """Bytes of the distinct encoded blocks that it refers to."""
    packs: tuple[str, ...]
    placements: Mapping[str, str]
    """Tensor -> how the ranks that saved it held it, in short: ``R,S(0) on 2x4`` (replicated along the first dim of a 2x4 mesh, and dim 0
    sharded along the second), ``boxes`` or ``flat``. Tensors that every rank held completely are left out."""
    groups: tuple[GroupCost, ...] = ()

    def __repr__(self) -> str:
        return f"SnapshotDetails({self.snapshot!r}, {len(self.tensors):,} tensors, {len(self.values):,} values)"

    def _repr_html_(self) -> str:
        rows = ((name, dtype, "x".join(map(str, shape)), human_bytes(size)) for name, dtype, shape, size in self.tensors)
        return html_table(repr(self), ("tensor", "dtype", "shape", "size"), rows)
