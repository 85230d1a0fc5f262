"""Log entries: sealed, numbered, hash-chained. Pure: bytes in, bytes out. Format: FORMAT.md, "Log entries".

A writer decodes an entry before it writes it, so that no reader rejects it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Digest, derived_hash
from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError
from tensorstore_ck.format.sealed import object_hash, seal, unseal
from tensorstore_ck.log.field_checks import COUNT, DIGEST, MAX_ACTOR_CHARS, ULID, first_invalid
from tensorstore_ck.log.operations import Op, op_problem

MAX_ENTRY_BYTES: Final = 1 << 20
ENTRIES_A_FOLDER: Final = 1000


class Entry(NamedTuple):
    """One decoded entry."""

    n: int
    prev: Digest
    """The hash of entry n - 1."""
    write_id: bytes
    """16 bytes that identify this exact entry, so that a writer recognizes its own."""
    time_ns: int
    actor: str
    ops: tuple[Op, ...]
    hash: Digest
    size_bytes: int


def genesis_hash(uuid: bytes) -> Digest:
    """The `prev` of entry 1."""
    return derived_hash("genesis", uuid)


def folder_name(prefix: str, n: int) -> str:
    """The folder of entry `n`, with the slash."""
    return f"{prefix}/{n // ENTRIES_A_FOLDER:017d}/"


def entry_name(prefix: str, n: int) -> str:
    """The name of entry `n` in the store."""
    return f"{folder_name(prefix, n)}{n:020d}"


def seal_entry(n: int, prev: Digest, ops: Sequence[Op], *, write_id: bytes, time_ns: int, actor: str) -> tuple[bytes, Entry]:
    """The bytes of an entry, and the decoded entry.

    Raises:
        InvalidOptionError: an operation that readers would refuse, or more than 1 MiB.
    """
    at = {"n": n, "prev": prev, "write_id": write_id, "time_ns": time_ns, "actor": actor[:MAX_ACTOR_CHARS]}
    sealed = seal("log", {**at, "ops": [op.fields for op in ops], "signatures": []})
    try:
        return sealed, decode_entry(sealed, f"the new log entry {n}", n)
    except CorruptObjectError as exc:
        raise InvalidOptionError(f"this operation cannot be stored: {exc}", object_id="ops") from exc


def decode_entry(data: bytes, name: str, n: int) -> Entry:
    """Decodes entry `n`. Raises `CorruptObjectError`: not that entry, or not valid; `FormatVersionError`: written by a newer format."""
    if len(data) > MAX_ENTRY_BYTES:
        raise CorruptObjectError(f"{name} has {len(data)} bytes, more than the {MAX_ENTRY_BYTES} of an entry", object_id=name)
    body = unseal("log", data, name)
    problem = None
    if body.get("n") != n or type(body["n"]) is not int:
        problem = f"its number is {body.get('n')!r:.40}"
    elif first_invalid((DIGEST, ULID, COUNT), (body.get("prev"), body.get("write_id"), body.get("time_ns"))) is not None:
        problem = "no valid hash of the entry before, write id or time"
    elif type(body.get("actor")) is not str or len(body["actor"]) > MAX_ACTOR_CHARS or type(body.get("signatures")) is not list:
        problem = "no valid actor or signatures"
    elif type(body.get("ops")) is not list:
        problem = "no operations"
    else:
        problem = next(filter(None, map(op_problem, body["ops"])), None)
    if problem is not None:
        raise CorruptObjectError(f"{name} is not a valid log entry: {problem}", object_id=name)
    ops, digest = tuple(map(Op, body["ops"])), object_hash(data)
    return Entry(n, body["prev"], body["write_id"], body["time_ns"], actor=body["actor"], ops=ops, hash=digest, size_bytes=len(data))
