"""Which refs must be signed again after a salvage: a signature counts in one log, and salvage has made a new one."""

import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.ref_statement import LogName
from tensorstore_ck.log import Entry, EntryReader, logs_in
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
    heads |= {name: row.root for name, row in view.tag_rows()}
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
