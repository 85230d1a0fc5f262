"""The operations of a log entry: made and checked here, applied by `fold`.

An operation is a map with ``op`` and ``critical``. A build that does not know a critical one stops writing; it keeps and
ignores others. A known operation may carry fields that this build does not know. Format: FORMAT.md, "Operations".
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.errors import AlreadyExistsError, InvalidOptionError, NotFoundError
from tensorstore_ck.format.record import Record
from tensorstore_ck.format.ref_statement import RefStatement
from tensorstore_ck.format.sealed import FOLDERS, object_hash
from tensorstore_ck.log.field_checks import (
    COUNT,
    COUNTS,
    DATE,
    DIGEST,
    GLOB,
    LIMIT,
    MARK,
    MAX_OP_NAME_CHARS,
    MAX_OWNER_BYTES,
    MAX_REASON_CHARS,
    MESSAGE,
    METRICS,
    OWNER,
    PARENT,
    PUBLIC_KEY,
    REASON,
    REF,
    RULES,
    RUN,
    SHORT_TEXT,
    SIGNATURE,
    STEP,
    ULID,
    ULIDS,
    URL,
    Field,
    first_invalid,
)
from tensorstore_ck.log.object_set import Objects, join_ulids

if TYPE_CHECKING:
    from tensorstore_ck.log.ref_table import RefTable


@dataclass(frozen=True, slots=True)
class Op:
    """One operation."""

    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its kind."""
        return str(self.fields["op"])

    @property
    def critical(self) -> bool:
        """Whether a build that does not know it must stop writing."""
        return bool(self.fields["critical"])

    @classmethod
    def put(
        cls,
        ref: str,
        snapshot: Ulid,
        record: Record,
        sealed_record: bytes,
        *,
        anchor: int,
        txn: bytes,
        staged: bytes | None = None,
        duration_ns: int | None = None,
    ) -> "Op":
        """Publishes a snapshot and moves branch `ref` to it; without effect if `txn` was aborted or put before.

        `staged`: the transaction under which it was staged, which this ends. `duration_ns`: how long the save took.
        """
        origin: dict[str, Any] = {} if staged is None else {"staged": staged}
        if duration_ns is not None:
            origin["duration_ns"] = duration_ns
        return _op("put", **origin, **_snapshot_fields(ref, snapshot, record, sealed_record), txn=txn, anchor=anchor)

    @classmethod
    def staged(cls, ref: str, snapshot: Ulid, record: Record, sealed_record: bytes, *, txn: bytes) -> "Op":
        """Records that a snapshot is durable on its hosts; a later put publishes it, or ``abort(txn)`` drops it."""
        return _op("staged", critical=False, txn=txn, **_snapshot_fields(ref, snapshot, record, sealed_record))

    @classmethod
    def branch(cls, name: str, root: Digest) -> "Op":
        """Makes a branch."""
        return _op("branch", name=name, root=root)

    @classmethod
    def reset(cls, name: str, root: Digest) -> "Op":
        """Moves a branch to any snapshot."""
        return _op("reset", name=name, root=root)

    @classmethod
    def tag(cls, name: str, root: Digest) -> "Op":
        """Makes a tag."""
        return _op("tag", name=name, root=root)

    @classmethod
    def untag(cls, name: str, view: "RefTable") -> "Op":
        """Removes a tag."""
        operation = _op("untag", name=name)
        operation.check(view)
        return operation

    @classmethod
    def annotate(cls, root: Digest, metrics: Mapping[str, float]) -> "Op":
        """Adds metrics to a snapshot."""
        return _op("annotate", critical=False, root=root, metrics={name: float(value) for name, value in metrics.items()})

    @classmethod
    def mark(cls, root: Digest, mark: str, reason: str = "") -> "Op":
        """Marks a snapshot, or removes the mark."""
        return _op("mark", critical=False, root=root, mark=mark, reason=reason)

    @classmethod
    def abort(cls, txn: bytes) -> "Op":
        """Aborts a save: the first of put and abort in the log counts."""
        return _op("abort", txn=txn)

    @classmethod
    def pin(cls, root: Digest, owner: str, reason: str, expires_ns: int | None) -> "Op":
        """Pins a snapshot; replaces another pin of the same owner on it. Raises `InvalidOptionError`: an invalid owner, reason or date."""
        if not OWNER.accepts(owner):
            raise InvalidOptionError(f"a pin's owner must be 1 to {MAX_OWNER_BYTES} bytes of UTF-8 without zero bytes", object_id="owner")
        if not REASON.accepts(reason):
            raise InvalidOptionError(f"a pin's reason must be a text of at most {MAX_REASON_CHARS:,} characters", object_id="reason")
        if not DATE.accepts(expires_ns):
            raise InvalidOptionError(
                "a pin must expire within the next centuries: leave `expires` out for a permanent pin", object_id="expires"
            )
        return _op("pin", root=root, owner=owner, reason=reason, expires_ns=expires_ns)

    @classmethod
    def unpin(cls, snapshot: Ulid, owner: str, view: "RefTable") -> "Op":
        """Removes a pin."""
        operation = _op("unpin", snapshot=snapshot, owner=owner)
        operation.check(view)
        return operation

    @classmethod
    def policy(cls, glob: str, rules: Mapping[str, Any] | None) -> "Op":
        """Sets the policy of the branches that match `glob`; None removes it."""
        return _op("policy", glob=glob, rules=rules)

    @classmethod
    def expire(cls, name: str, snapshots: Collection[Ulid] | None) -> "Op":
        """Removes snapshots from a branch's history, all but its head; None: the whole branch. They can be restored until `purge`."""
        return _op("expire", name=name, snapshots=None if snapshots is None else join_ulids(snapshots))

    @classmethod
    def undo(cls, n: int, name: str, snapshots: Collection[Ulid]) -> "Op":
        """Restores what entry `n` removed from `name`."""
        return _op("undo", n=n, name=name, snapshots=join_ulids(snapshots))

    @classmethod
    def purge(cls, n: int, name: str) -> "Op":
        """Ends the undo window of what entry `n` removed from `name`."""
        return _op("purge", n=n, name=name)

    @classmethod
    def condemn(cls, objects: Objects) -> "Op":
        """Lists objects for deletion; they can be rescued until they are swept."""
        return _op("condemn", **objects.fields())

    @classmethod
    def rescue(cls, objects: Objects) -> "Op":
        """Takes condemned objects off the list."""
        return _op("rescue", **objects.fields())

    @classmethod
    def sweep(cls, objects: Objects) -> "Op":
        """Sweeps condemned objects: they are never used again and may be deleted at any time. A moved object's relocation ends."""
        return _op("sweep", **objects.fields())

    @classmethod
    def relocate(cls, pack: Ulid, moved: Ulid, moved_hash: Digest, targets: Collection[Ulid]) -> "Op":
        """Relocates the entries of `pack` that `moved` lists to the packs `targets`."""
        return _op("relocate", pack=pack, moved=moved, hash=moved_hash, targets=join_ulids(targets))

    @classmethod
    def set_location(cls, packs: Collection[Ulid], url: str) -> "Op":
        """Records that packs lie at a cold location; once per pack, in the entry that first needs it."""
        return _op("place", packs=join_ulids(packs), url=url)

    @classmethod
    def truncate_tombstones(cls, n: int) -> "Op":
        """Drops the tombstones of objects swept at entry `n` or before; nothing anchored before `n` can commit any more."""
        return _op("settle", n=n)

    @classmethod
    def quota(cls, glob: str, warn_bytes: int | None, refuse_bytes: int | None) -> "Op":
        """Sets the quota of the branches that match `glob`; without both limits removes it."""
        return _op("quota", critical=False, glob=glob, warn_bytes=warn_bytes, refuse_bytes=refuse_bytes)

    @classmethod
    def report(cls, run: str, outcome: str, duration_ns: int, counts: Mapping[str, int], message: str = "") -> "Op":
        """Reports the outcome of a run of gc or fsck that ends now."""
        return _op("report", critical=False, run=run, outcome=outcome, duration_ns=duration_ns, counts=counts, message=message)

    @classmethod
    def finished(cls, ref: str, root: Digest) -> "Op":
        """Says that the training of a branch ended with the snapshot `root`. Nothing is folded: pages and alerts read the entry."""
        return _op("finished", critical=False, ref=ref, root=root)

    @classmethod
    def sign(cls, statement: RefStatement, key: bytes, signature: bytes) -> "Op":
        """Carries the signature of a ref. Nothing is folded: who has a trust file reads the entry."""
        said = {"ref": statement.ref, "root": statement.root, "step": statement.step}
        return _op("sign", critical=False, **said, number=statement.number, time_ns=statement.time_ns, key=key, signature=signature)

    def check(self, view: "RefTable") -> None:
        """Checks the operation's preconditions at `view`. The caller checks those of a put.

        Raises:
            AlreadyExistsError: a branch or tag of that name exists.
            NotFoundError: there is no such branch, tag or snapshot.
        """
        name, root = self.fields.get("name"), self.fields.get("root")
        if self.name in ("branch", "tag"):
            kind = "branch" if view.branch(name or "") else "tag" if view.tag(name or "") else None
            if kind is not None:
                advice = "move it with reset" if (kind, self.name) == ("branch", "branch") else "take another name"
                raise AlreadyExistsError(f"there is a {kind} {name!r} already: {advice}", object_id=str(name))
        if self.name == "reset" and view.branch(name or "") is None:
            raise NotFoundError(f"there is no branch {name!r}: make it with branch", object_id=str(name))
        if self.name == "untag" and view.tag(name or "") is None:
            raise NotFoundError(f"there is no tag {name!r}: see the list of tags", object_id=str(name))
        if self.name == "unpin" and not view.is_pinned(self.fields["snapshot"], self.fields["owner"]):
            owner = self.fields["owner"]
            raise NotFoundError(f"{owner!r} has no pin on that snapshot: `tsck pin` lists the pins", object_id=owner)
        if self.name not in ("put", "staged") and root is not None and view.by_root(root) is None:
            raise NotFoundError(f"there is no snapshot {root.hex()}", object_id=root.hex())


def _op(kind: str, /, *, critical: bool = True, **fields: Any) -> Op:
    return Op({"op": kind, "critical": critical, **fields})


def _snapshot_fields(ref: str, snapshot: Ulid, record: Record, sealed_record: bytes) -> dict[str, Any]:
    return {
        "ref": ref,
        "snapshot": snapshot,
        "root": record.root(),
        "record": object_hash(sealed_record),
        "parent": record.parent,
        "step": record.step,
        "metrics": record.metrics,
        "logical_bytes": record.logical_bytes,
        "new_bytes": record.new_bytes,
        "made_ns": record.time_ns,
        **record.origin_fields(),
    }


def op_problem(fields: object) -> str | None:
    """The problem of a decoded operation; None without one."""
    if type(fields) is not dict:
        return "an operation is not a map"
    name = fields.get("op")
    if type(name) is not str or not 0 < len(name) <= MAX_OP_NAME_CHARS or type(fields.get("critical")) is not bool:
        return "an operation has no name, or no critical bit"
    schema = SCHEMA.get(name, {})
    invalid = first_invalid(schema.values(), map(fields.get, schema, repeat(...)))  # no field may hold an Ellipsis
    return None if invalid is None else f"operation {name} has no valid {list(schema)[invalid]}"


_OBJECTS: Final[Mapping[str, Field]] = dict.fromkeys(FOLDERS.values(), ULIDS)
_SNAPSHOT: Final[Mapping[str, Field]] = {
    "ref": REF,
    "snapshot": ULID,
    "root": DIGEST,
    "record": DIGEST,
    "parent": PARENT,
    "step": STEP,
    "txn": ULID,
    "metrics": METRICS,
    "logical_bytes": COUNT,
    "new_bytes": COUNT,
}

SCHEMA: Final[Mapping[str, Mapping[str, Field]]] = {
    "put": {**_SNAPSHOT, "anchor": COUNT},
    "staged": _SNAPSHOT,
    "branch": {"name": REF, "root": DIGEST},
    "reset": {"name": REF, "root": DIGEST},
    "tag": {"name": REF, "root": DIGEST},
    "untag": {"name": REF},
    "annotate": {"root": DIGEST, "metrics": METRICS},
    "mark": {"root": DIGEST, "mark": MARK, "reason": REASON},
    "abort": {"txn": ULID},
    "pin": {"root": DIGEST, "owner": OWNER, "reason": REASON, "expires_ns": DATE},
    "unpin": {"snapshot": ULID, "owner": OWNER},
    "policy": {"glob": GLOB, "rules": RULES.or_nil()},
    "expire": {"name": REF, "snapshots": ULIDS.or_nil()},
    "undo": {"n": COUNT, "name": REF, "snapshots": ULIDS},
    "purge": {"n": COUNT, "name": REF},
    "condemn": _OBJECTS,
    "rescue": _OBJECTS,
    "sweep": _OBJECTS,
    "relocate": {"pack": ULID, "moved": ULID, "hash": DIGEST, "targets": ULIDS},
    "place": {"packs": ULIDS, "url": URL},
    "settle": {"n": COUNT},
    "quota": {"glob": GLOB, "warn_bytes": LIMIT, "refuse_bytes": LIMIT},
    "report": {"run": RUN, "outcome": SHORT_TEXT, "duration_ns": COUNT, "counts": COUNTS, "message": MESSAGE},
    "finished": {"ref": REF, "root": DIGEST},
    "sign": {"ref": REF, "root": DIGEST, "step": STEP, "number": COUNT, "time_ns": COUNT, "key": PUBLIC_KEY, "signature": SIGNATURE},
}
"""Operation -> its fields."""
