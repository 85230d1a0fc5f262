"""The operations of a log entry: made and checked here, applied by `fold`.

An operation is a map with ``op`` and ``critical``. A build that does not know a critical one stops writing; it keeps and
ignores others. A known operation may carry fields that this build does not know. Format: FORMAT.md, "Operations".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tensorstore_ck.envelope import object_hash
from tensorstore_ck.errors import AlreadyExistsError, NotFoundError
from tensorstore_ck.ids import DIGEST_BYTES, ULID_BYTES, Digest, Ulid
from tensorstore_ck.log.names import is_ref_name
from tensorstore_ck.record import Record

if TYPE_CHECKING:
    from tensorstore_ck.log.reftable import RefTable

MAX_METRICS: Final = 1024
MAX_METRIC_NAME_CHARS: Final = 256
MAX_REASON_CHARS: Final = 4096
MAX_OP_NAME_CHARS: Final = 64
MARKS: Final = ("bad", "")


@dataclass(frozen=True, slots=True)
class Op:
    """One operation."""

    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What it does."""
        return str(self.fields["op"])

    @property
    def critical(self) -> bool:
        """Whether a build that does not know it must stop writing."""
        return bool(self.fields["critical"])

    @classmethod
    def put(cls, ref: str, snapshot: Ulid, record: Record, sealed_record: bytes, *, anchor: int, txn: bytes) -> "Op":
        """Publishes a snapshot and moves branch `ref` to it; without effect if `txn` was aborted or put before."""
        return _op(
            "put",
            ref=ref,
            snapshot=snapshot,
            root=record.root(),
            record=object_hash(sealed_record),
            parent=record.parent,
            step=record.step,
            txn=txn,
            anchor=anchor,
            metrics=record.metrics,
            logical_bytes=record.logical_bytes,
            new_bytes=record.new_bytes,
        )

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
        """Marks a snapshot, or takes the mark back."""
        return _op("mark", critical=False, root=root, mark=mark, reason=reason)

    @classmethod
    def abort(cls, txn: bytes) -> "Op":
        """Gives a put up: of put and abort the first in the log counts."""
        return _op("abort", txn=txn)

    def check(self, view: "RefTable") -> None:
        """Its preconditions at `view`, but those of a put, which its caller knows.

        Raises:
            AlreadyExistsError: a branch or tag of that name is there.
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
        if self.name != "put" and root is not None and view.by_root(root) is None:
            raise NotFoundError(f"there is no snapshot {root.hex()}", object_id=root.hex())


def _op(kind: str, /, *, critical: bool = True, **fields: Any) -> Op:
    return Op({"op": kind, "critical": critical, **fields})


def op_problem(fields: object) -> str | None:
    """What is wrong with a decoded operation; None when nothing is."""
    if type(fields) is not dict:
        return "an operation is not a map"
    name = fields.get("op")
    if type(name) is not str or not 0 < len(name) <= MAX_OP_NAME_CHARS or type(fields.get("critical")) is not bool:
        return "an operation has no name, or no critical bit"
    for field, is_valid in SCHEMA.get(name, {}).items():
        if field not in fields or not is_valid(fields[field]):
            return f"operation {name} has no valid {field}"
    return None


def _bytes(length: int) -> "Check":
    return lambda value: type(value) is bytes and len(value) == length


def _integer(low: int) -> "Check":
    return lambda value: type(value) is int and low <= value < 1 << 63


def _optional(check: "Check") -> "Check":
    return lambda value: value is None or check(value)


def _is_metrics(value: object) -> bool:
    return (
        type(value) is dict
        and len(value) <= MAX_METRICS
        and all(type(name) is str and len(name) <= MAX_METRIC_NAME_CHARS and type(number) is float for name, number in value.items())
    )


def _is_reason(value: object) -> bool:
    return type(value) is str and len(value) <= MAX_REASON_CHARS


def _is_mark(value: object) -> bool:
    return type(value) is str and value in MARKS


Check = Callable[[object], bool]
is_digest: Final = _bytes(DIGEST_BYTES)
is_ulid: Final = _bytes(ULID_BYTES)
is_count: Final = _integer(0)
is_step: Final = _optional(_integer(-(1 << 63)))
is_parent: Final = _optional(is_digest)
is_metrics: Final = _is_metrics
is_mark: Final = _is_mark
is_reason: Final = _is_reason

SCHEMA: Final[Mapping[str, Mapping[str, Check]]] = {
    "put": {
        "ref": is_ref_name,
        "snapshot": is_ulid,
        "root": is_digest,
        "record": is_digest,
        "parent": is_parent,
        "step": is_step,
        "txn": is_ulid,
        "anchor": is_count,
        "metrics": is_metrics,
        "logical_bytes": is_count,
        "new_bytes": is_count,
    },
    "branch": {"name": is_ref_name, "root": is_digest},
    "reset": {"name": is_ref_name, "root": is_digest},
    "tag": {"name": is_ref_name, "root": is_digest},
    "untag": {"name": is_ref_name},
    "annotate": {"root": is_digest, "metrics": is_metrics},
    "mark": {"root": is_digest, "mark": is_mark, "reason": is_reason},
    "abort": {"txn": is_ulid},
}
"""Operation -> its fields and what makes each valid."""
