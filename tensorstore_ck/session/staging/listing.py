"""Lists the saves that are staged and not published, by the manifests on one disk and by the log. Changes nothing."""

import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from tensorstore_ck.backend.protocol import size_if_there
from tensorstore_ck.backend.resumable_upload import UploadGoneError, resumable
from tensorstore_ck.backend.staging import StagingFolder
from tensorstore_ck.common.ids import Ulid, parse_ulid, ulid_text
from tensorstore_ck.common.units import listed
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.record import decode_record, record_name
from tensorstore_ck.log import RefTable, SnapshotRow
from tensorstore_ck.session.staging.manifest import Manifest, read_manifests
from tensorstore_ck.session.staging.outcome import published_as

State = Literal["staged", "published", "given up", "unknown"]
"""Its state in the log; `unknown`: the log has nothing of it yet."""


@dataclass(frozen=True, slots=True)
class StagedSaveInfo:
    """A save that was staged."""

    txn: str
    """The transaction; the snapshot's ULID."""
    ref: str | None = None
    """None if only a damaged manifest is known."""
    step: int | None = None
    root: str | None = None
    state: State = "unknown"
    ranks: int | None = None
    here: tuple[int, ...] = ()
    """The ranks that have a manifest on this disk."""
    size_bytes: int = 0
    """The bytes of their objects, some of which may belong to other staged saves, too."""
    sent_bytes: int = 0
    """The part of `size_bytes` that is in the store already."""
    time_ns: int = 0
    """When it was staged, since 1970."""
    problems: tuple[str, ...] = ()
    """Why it cannot be published from this disk."""
    is_here: bool = True
    """Whether any manifest of it, even a damaged one, is on this disk."""
    host: str = ""
    """The host that staged it; empty if unknown."""
    folder: str = ""
    """The folder of this host that has it."""


def list_staged(engine: Engine, folder: StagingFolder | None) -> list[StagedSaveInfo]:
    """The saves that are staged on the disk or by the log, oldest first."""
    engine.log.sync()
    view = engine.log.view()
    by_txn: dict[Ulid, list[Manifest]] = {}
    manifests, damaged = read_manifests(folder) if folder is not None else ([], {})
    for manifest in manifests:
        by_txn.setdefault(manifest.txn, []).append(manifest)
    saves = {txn: replace(_of_log(info), host=_host_of(engine, info)) for txn, info in view.all_staged()}
    if folder is not None:
        host, path = socket.gethostname(), folder.path
        saves |= {txn: replace(_of_disk(engine, folder, view, of_txn), host=host, folder=path) for txn, of_txn in by_txn.items()}
        for key, error in damaged.items():
            txn = parse_ulid(key.partition("-")[0])
            if txn is not None:
                known = saves.get(txn) or StagedSaveInfo(ulid_text(txn), state=_state(engine, view, txn))
                saves[txn] = replace(known, problems=(*known.problems, str(error)), is_here=True, host=host, folder=path)
    return sorted(saves.values(), key=lambda save: (save.time_ns, save.txn))


def list_disk(folder: StagingFolder) -> list[StagedSaveInfo]:
    """The saves on the disk, for a store that does not answer: which of them are published or uploaded is unknown."""
    saves: list[StagedSaveInfo] = []
    for manifest in read_manifests(folder)[0]:
        record = decode_record(manifest.lead.record, record_name(manifest.txn)) if manifest.lead is not None else None
        root, time_ns = (record.root().hex(), record.time_ns) if record is not None else (None, 0)
        size_bytes = sum(folder.unsent.size(name) for name in manifest.names if folder.has_unsent(name))
        saves.append(
            StagedSaveInfo(
                txn=ulid_text(manifest.txn),
                ref=manifest.ref,
                step=manifest.step,
                root=root,
                ranks=manifest.ranks,
                here=(manifest.rank,),
                size_bytes=size_bytes,
                time_ns=time_ns,
                host=socket.gethostname(),
                folder=folder.path,
            )
        )
    return sorted(saves, key=lambda save: (save.time_ns, save.txn))


def _host_of(engine: Engine, info: SnapshotRow) -> str:
    """The host that wrote the log entry. Of a save of many ranks, it is the host of rank 0."""
    with suppress(StoreError):
        entry = engine.log.chain.read(info.n)
        return entry.actor.rpartition(":")[0].rpartition("@")[2] if entry is not None else ""
    return ""


def _state(engine: Engine, view: RefTable, txn: Ulid) -> State:
    if view.staged(txn) is not None:
        return "staged"
    if published_as(engine, view, txn) is not None:
        return "published"
    return "given up" if view.outcome(txn) is not None else "unknown"


def _of_log(info: SnapshotRow) -> StagedSaveInfo:
    problem = "nothing of it is on this disk: the hosts that staged it can publish it"
    return StagedSaveInfo(
        txn=ulid_text(info.ulid),
        ref=info.ref,
        step=info.step,
        root=info.root.hex(),
        state="staged",
        size_bytes=info.new_bytes,
        time_ns=info.time_ns,
        problems=(problem,),
        is_here=False,
    )


def _of_disk(engine: Engine, folder: StagingFolder, view: RefTable, manifests: Sequence[Manifest]) -> StagedSaveInfo:
    first, here = manifests[0], tuple(manifest.rank for manifest in manifests)
    info = view.staged(first.txn) or view.snapshot(first.txn)
    lead = next((manifest.lead for manifest in manifests if manifest.lead is not None), None)
    record = decode_record(lead.record, record_name(first.txn)) if lead is not None else None
    root = info.root if info is not None else record.root() if record is not None else None
    sent = {name: _sent_bytes(engine, folder, name) for name in {name: None for manifest in manifests for name in manifest.names}}
    return StagedSaveInfo(
        txn=ulid_text(first.txn),
        ref=first.ref,
        step=first.step,
        root=None if root is None else root.hex(),
        state=_state(engine, view, first.txn),
        ranks=first.ranks,
        here=here,
        size_bytes=sum(sizes[0] for sizes in sent.values() if sizes is not None),
        sent_bytes=sum(sizes[1] for sizes in sent.values() if sizes is not None),
        time_ns=info.time_ns if info is not None else record.time_ns if record is not None else 0,
        problems=tuple(_problems(here, first.ranks, sent, has_lead=lead is not None)),
    )


def _problems(here: Collection[int], ranks: int, sent: Mapping[str, tuple[int, int] | None], *, has_lead: bool) -> Iterator[str]:
    missing = [rank for rank in range(ranks) if rank not in here]
    if missing:
        yield f"what rank {listed(missing)} staged is not on this disk"
    elif not has_lead:
        yield "not all ranks had staged it"
    lost = [name for name, size in sent.items() if size is None]
    if lost:
        yield f"neither on this disk nor in the store: {listed(lost)}"


def _sent_bytes(engine: Engine, folder: StagingFolder, name: str) -> tuple[int, int] | None:
    """The size of an object, and how much of it is in the store; None if it does not exist."""
    store = engine.tier.backend.store if engine.tier is not None else engine.backend
    entry = folder.journal.read(name)
    size_bytes = size_if_there(folder.unsent, name)
    if size_bytes is None:
        stored_bytes = size_if_there(store, name if entry is None else entry.store_name)
        return None if stored_bytes is None else (stored_bytes, stored_bytes)
    if entry is None or not entry.token or entry.is_complete:
        return size_bytes, size_bytes if entry is not None and entry.is_complete else 0
    pieces = resumable(store)
    try:
        missing = pieces.resume_upload(entry.store_name, size_bytes, entry.token).missing if pieces is not None else ()
    except (StoreError, UploadGoneError):
        return size_bytes, 0
    return size_bytes, size_bytes - sum(piece.size_bytes for piece in missing)
