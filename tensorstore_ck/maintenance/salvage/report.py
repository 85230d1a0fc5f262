"""The report of salvage, and which refs must be signed again: a signature counts in one log, and salvage has made a new one."""

import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import ulid_text
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.ref_statement import LogName
from tensorstore_ck.log import Entry, EntryReader, SnapshotInfo, logs_in
from tensorstore_ck.log.ref_verifier import RefVerifier
from tensorstore_ck.log.trust_file import TrustFile


@dataclass(frozen=True, slots=True)
class RefToSign:
    """A branch or tag that the trust file names."""

    ref: str
    root: str
    was_signed: bool
    """Whether its newest valid signature in the former log is of this root. If not, somebody else may have moved it."""


def refs_to_sign(engine: Engine, trust: TrustFile) -> list[RefToSign]:
    """The refs of a store with a salvaged log that the trust file names."""
    view, store = engine.log.newest_view(), uuid.UUID(engine.config.uuid).bytes
    former = [log for log in logs_in(engine.backend) if log != engine.config.log]
    signed: dict[str, str] = {}
    if former:
        verifier = RefVerifier(trust, LogName(store, former[-1]))
        signed = verifier.newest(_readable_entries(engine.backend, store, former[-1]))
    heads = {name: head.root for name in view.branches() if (head := view.branch(name)) is not None}
    heads |= {name: root for name in view.tags() if (root := view.tag(name)) is not None}
    return [
        RefToSign(ref, root.hex(), signed.get(ref) == root.hex()) for ref, root in sorted(heads.items()) if trust.keys_of(ref) is not None
    ]


def _readable_entries(backend: Backend, store: bytes, log: str) -> Iterator[Entry]:
    """The entries that are left of a damaged log."""
    chain = EntryReader(backend, uuid=store, prefix=log)
    for n in sorted(chain.listed(f"{log}/")):
        with suppress(StoreError):
            entry = chain.read(n)
            if entry is not None:
                yield entry


@dataclass(frozen=True, slots=True)
class Salvaged:
    """One snapshot in the report."""

    id: str
    ref: str
    step: int | None
    root: str
    note: str
    """How it was found, or why it is not in the new log."""


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """The result of a salvage; with ``dry_run``, the result that it would have."""

    log: str
    """Prefix of the new log; empty if the old log is intact, and nothing was done."""
    problems: tuple[str, ...]
    """The damage that was found."""
    branches: tuple[str, ...]
    tags: tuple[str, ...]
    kept: int
    """Held snapshots in the new log."""
    recovered: tuple[Salvaged, ...]
    """The held snapshots that no surviving entry or checkpoint names (perhaps also one whose save was interrupted just before its end), and
    those that nothing holds according to the surviving entries: `undo` brings them back until gc frees them."""
    lost: tuple[Salvaged, ...]
    """Damaged snapshots, which are not in the new log."""
    left_out: tuple[Salvaged, ...]
    """Intact, but never published: interrupted and aborted saves, and those that lost a race."""


def salvaged(info: SnapshotInfo, note: str) -> Salvaged:
    """The report's row of a snapshot."""
    return Salvaged(id=ulid_text(info.ulid), ref=info.ref, step=info.step, root=info.root.hex(), note=note)
