"""Log entries -> the changes that they make to a catalog, as plain values.

A put counts unless it was aborted or is a repetition. Operations on refs, tags and pins only note the snapshots that they may affect:
their state is then read from the fold.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tensorstore_ck.catalog.schema import snapshot_id
from tensorstore_ck.common.ids import ULID_BYTES, Ulid, split_ulids, ulid_text
from tensorstore_ck.format.attributes import Attributes
from tensorstore_ck.log import FOLDERS, Entry, Op, SnapshotRow
from tensorstore_ck.log.snapshot import job_of, searchable

Row = dict[str, Any]
CHANGED_TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "put": ("refs", "quotas"),
    "branch": ("refs", "quotas"),
    "reset": ("refs", "quotas"),
    "expire": ("refs",),
    "undo": ("refs", "tags"),
    "tag": ("tags", "quotas"),
    "untag": ("tags",),
    "pin": ("pins", "quotas"),
    "unpin": ("pins", "quotas"),
    "policy": ("policies",),
    "purge": ("quotas",),
    "sweep": (),
    "annotate": (),
    "mark": (),
    "staged": (),
    "abort": (),
    "condemn": (),
    "rescue": (),
    "relocate": (),
    "place": (),
    "settle": (),
    "quota": ("quotas",),
    "report": (),
    "finished": (),
    "sign": (),
}
"""Operation -> the tables that it may change, among the tables that are read from the fold. Any other operation changes none."""
_GC: Final = ("condemn", "sweep", "relocate", "purge", "settle")
_TEXTS: Final = ("mark", "reason", "owner", "glob", "url", "run", "outcome", "message")
_NUMBERS: Final = ("step", "logical_bytes", "new_bytes", "expires_ns", "duration_ns", "warn_bytes", "refuse_bytes")
_LISTS: Final = (*FOLDERS.values(), "targets")


class PutEvent(NamedTuple):
    """A snapshot was published."""

    row: Row
    metrics: Mapping[str, float]
    attributes: Attributes


class AnnotatedEvent(NamedTuple):
    """Metrics or a mark were added to a root."""

    root: str
    metrics: Mapping[str, float]
    mark: tuple[str, str] | None
    """The mark with its reason; None: unchanged."""


class FreedEvent(NamedTuple):
    """A snapshot's record was swept, and the fold no longer has it."""

    ulid: str
    n: int


@dataclass(slots=True)
class EntryEvents:
    """The changes of a batch of entries."""

    store_id: int
    counts: Callable[[int, bytes], bool]
    """Whether the put in entry n is the outcome of this transaction."""
    is_known: Callable[[Ulid], bool]
    """Whether the fold has a snapshot at its head."""
    events: list[Row] = field(default_factory=list)
    gc_runs: list[Row] = field(default_factory=list)
    reports: list[Row] = field(default_factory=list)
    changes: list[PutEvent | AnnotatedEvent | FreedEvent] = field(default_factory=list)
    affected_ulids: set[str] = field(default_factory=set)
    """Snapshots whose state may have changed."""
    affected_roots: set[str] = field(default_factory=set)
    """The state of all their snapshots may have changed."""
    all_affected: bool = False
    """The state of any snapshot may have changed."""
    tables: set[str] = field(default_factory=set)
    """Tables that are read from the fold and may have changed."""

    def add(self, entry: Entry) -> None:
        """Adds the changes of one entry."""
        put_txns: set[bytes] = set()
        for position, op in enumerate(entry.ops):
            counted = op.name == "put" and op.fields["txn"] not in put_txns and self.counts(entry.n, op.fields["txn"])
            if counted:
                self._put(entry, len(put_txns), op.fields)
                put_txns.add(op.fields["txn"])
            self.events.append(_event(entry, position, op, counted=counted))
            self._add_changes(entry, op)
            if op.name == "report":
                self.reports.append(_report(entry, position, op.fields))
            if counted or op.name != "put":
                self._note_affected(op)
        if any(op.name in _GC for op in entry.ops):
            self.gc_runs.append(_gc_run(entry))

    def _put(self, entry: Entry, position: int, fields: Mapping[str, Any]) -> None:
        info = SnapshotRow.of_op(fields, entry.n, entry.time_ns)
        row = {
            "id": snapshot_id(self.store_id, entry.n, position),
            "store_id": self.store_id,
            "ulid": ulid_text(fields["snapshot"]),
            "root": fields["root"].hex(),
            "parent": fields["parent"].hex() if fields["parent"] else None,
            "ref": fields["ref"],
            "job": job_of(fields["ref"]),
            "step": fields["step"],
            "n": entry.n,
            "time_ns": info.time_ns,
            "actor": clean(entry.actor),
            "logical_bytes": fields["logical_bytes"],
            "new_bytes": fields["new_bytes"],
            "duration_ns": info.duration_ns,
        }
        self.changes.append(PutEvent(row, cleaned(fields["metrics"]), searchable(info)))

    def _add_changes(self, entry: Entry, op: Op) -> None:
        fields = op.fields
        if op.name == "annotate":
            self.changes.append(AnnotatedEvent(fields["root"].hex(), cleaned(fields["metrics"]), None))
        elif op.name == "mark":
            self.changes.append(AnnotatedEvent(fields["root"].hex(), {}, (fields["mark"], clean(fields["reason"]))))
        elif op.name == "sweep":
            self.changes += [FreedEvent(ulid_text(ulid), entry.n) for ulid in split_ulids(fields["snapshots"]) if not self.is_known(ulid)]

    def _note_affected(self, op: Op) -> None:
        """Notes the snapshots and tables that an operation may change."""
        self.tables.update(CHANGED_TABLES.get(op.name, ()))
        if op.name in ("untag", "purge") or (op.name == "expire" and op.fields["snapshots"] is None):
            self.all_affected = True
        elif op.name in ("put", "unpin"):
            self.affected_ulids.add(ulid_text(op.fields["snapshot"]))
        elif op.name in ("expire", "undo", "sweep"):
            self.affected_ulids.update(map(ulid_text, split_ulids(op.fields["snapshots"])))
        elif op.name in ("branch", "reset", "tag", "pin"):
            self.affected_roots.add(op.fields["root"].hex())


def clean(text: str) -> str:
    """The text without zero bytes, which PostgreSQL cannot hold."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def cleaned(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics with `clean` names."""
    return {clean(name): value for name, value in metrics.items()}


def _event(entry: Entry, position: int, op: Op, *, counted: bool) -> Row:
    fields = op.fields
    ref, root, snapshot = fields.get("ref", fields.get("name")), fields.get("root"), fields.get("snapshot")
    return {
        "n": entry.n,
        "position": position,
        "time_ns": entry.time_ns,
        "actor": clean(entry.actor),
        "op": clean(op.name),
        "ref": clean(ref) if isinstance(ref, str) else None,
        "root": root.hex() if isinstance(root, bytes) else None,
        "ulid": ulid_text(Ulid(snapshot)) if isinstance(snapshot, bytes) and len(snapshot) == ULID_BYTES else None,
        "detail": json.dumps(dict(_detail(op, counted=counted)), ensure_ascii=False),
    }


def _detail(op: Op, *, counted: bool) -> Iterator[tuple[str, object]]:
    """The fields of an operation, with counts instead of lists."""
    fields = op.fields
    if op.name == "put" and not counted:
        yield "counted", False
    for name in _TEXTS:
        if isinstance(fields.get(name), str):
            yield name, clean(fields[name])
    for name in _NUMBERS:
        if isinstance(fields.get(name), int):
            yield name, fields[name]
    for name in _LISTS:
        if isinstance(fields.get(name), bytes) and fields[name]:
            yield name, len(fields[name]) // ULID_BYTES
    if op.name in ("undo", "purge", "settle"):
        yield "entry", fields["n"]
    if op.name == "annotate":
        yield "metrics", len(fields["metrics"])


def _report(entry: Entry, position: int, fields: Mapping[str, Any]) -> Row:
    return {
        "n": entry.n,
        "position": position,
        "time_ns": entry.time_ns,
        "actor": clean(entry.actor),
        "run": fields["run"],
        "outcome": clean(fields["outcome"]),
        "duration_ns": fields["duration_ns"],
        "counts": json.dumps(fields["counts"], ensure_ascii=False, sort_keys=True),
        "message": clean(fields["message"]),
    }


def _gc_run(entry: Entry) -> Row:
    row: Row = {f"{what}_{folder}": 0 for what in ("condemned", "swept", "rescued") for folder in FOLDERS.values()}
    row |= {"n": entry.n, "time_ns": entry.time_ns, "actor": clean(entry.actor), "settled_n": None}
    row |= {"relocated_packs": 0, "purged_windows": 0}
    for op in entry.ops:
        what = {"condemn": "condemned", "sweep": "swept", "rescue": "rescued"}.get(op.name)
        if what is not None:
            for folder in FOLDERS.values():
                row[f"{what}_{folder}"] += len(op.fields[folder]) // ULID_BYTES
        row["relocated_packs"] += op.name == "relocate"
        row["purged_windows"] += op.name == "purge"
        if op.name == "settle":
            row["settled_n"] = op.fields["n"]
    return row
