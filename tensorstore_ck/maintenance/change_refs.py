"""Changes of refs and snapshots by one log entry each: branch, reset, tag, untag, annotate, mark, finish, pin, unpin.

Functions of the engine: they know no session.
"""

from collections.abc import Callable, Mapping

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.units import parse_seconds
from tensorstore_ck.engine.engine import Engine, current_user
from tensorstore_ck.engine.reachability import rescue_if_expired
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.record import check_metrics
from tensorstore_ck.log import Op, RefTable, SnapshotRow, validate_ref_name
from tensorstore_ck.log.address import resolve
from tensorstore_ck.log.ref_signer import MOVES
from tensorstore_ck.log.snapshot import Snapshot, pinned_with_root


def branch(engine: Engine, name: str, at: str) -> Snapshot:
    """See `Store.branch`."""
    validate_ref_name(name)
    return _append(engine, at, lambda root: Op.branch(name, root))


def reset(engine: Engine, name: str, to: str) -> Snapshot:
    """See `Store.reset`."""
    validate_ref_name(name)
    return _append(engine, to, lambda root: Op.reset(name, root))


def tag(engine: Engine, name: str, at: str) -> Snapshot:
    """See `Store.tag`."""
    validate_ref_name(name)
    return _append(engine, at, lambda root: Op.tag(name, root))


def untag(engine: Engine, name: str) -> None:
    """See `Store.untag`."""
    engine.require_writable()
    engine.log.append(lambda view: [Op.untag(name, view)])


def annotate(engine: Engine, address: str, metrics: Mapping[str, float]) -> Snapshot:
    """See `Store.annotate`."""
    checked = check_metrics(metrics)
    return _append(engine, address, lambda root: Op.annotate(root, checked))


def mark(engine: Engine, address: str, mark: str, reason: str) -> Snapshot:
    """See `Store.mark`."""
    if mark not in ("bad", ""):
        raise InvalidOptionError(f"mark must be 'bad' or '', not {mark!r}", object_id="mark")
    return _append(engine, address, lambda root: Op.mark(root, mark, reason))


def finish(engine: Engine, ref: str) -> Snapshot:
    """See `Store.finish`."""
    validate_ref_name(ref)
    return _append(engine, ref, lambda root: Op.finished(ref, root))


def sign(engine: Engine, ref: str, expect: str) -> Snapshot:
    """See `Store.sign`."""
    engine.require_writable()
    validate_ref_name(ref)
    signer = engine.signer
    if signer is None:
        raise InvalidOptionError(f"signing {ref!r} needs a key: open the store with sign=, or give --sign FILE", object_id="sign")
    engine.log.append(lambda view: [signer.head(view, ref, expect)])
    return Snapshot.from_info(resolve(engine.log.view(), ref).info)


def pin(engine: Engine, address: str, *, reason: str, owner: str | None, expires: "str | float | None") -> Snapshot:
    """See `Store.pin`."""
    seconds = None if expires is None else parse_seconds(expires, "expires")
    expires_ns = None if seconds is None else engine.clock() + int(seconds * 1e9)
    return _append(engine, address, lambda root: Op.pin(root, owner or current_user(), reason, expires_ns))


def unpin(engine: Engine, address: str, owner: str | None) -> None:
    """See `Store.unpin`."""
    engine.require_writable()
    who = owner or current_user()
    engine.log.append(lambda view: [Op.unpin(ulid, who, view) for ulid in pinned_with_root(view, resolve(view, address).info, who)])


def _append(engine: Engine, address: str, make: Callable[[Digest], Op]) -> Snapshot:
    """Appends one operation on the snapshot at `address`; returns the snapshot as it is then."""
    engine.require_writable()
    infos: list[SnapshotRow] = []

    def build(view: RefTable) -> list[Op]:
        resolved = resolve(view, address)
        infos[:] = [resolved.info]
        operation = make(resolved.info.root)
        operation.check(view)
        if operation.name in MOVES and engine.trust is not None:  # a signature of the new place would vouch for an untrusted one
            engine.trust.check(engine.log, view, resolved)
        return [operation, *rescue_if_expired(engine, view, infos[0])]

    engine.log.append(build)
    return Snapshot.from_info(engine.log.view().snapshot(infos[0].ulid) or infos[0])
