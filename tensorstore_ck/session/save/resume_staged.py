"""Continues saves that earlier processes staged and could not publish: their manifests lie on the staging disk.

A save of one process is continued by any process that opens the store with that disk, once the process that staged it has ended. A save of
many ranks needs the disks of all their hosts: the ranks of a group exchange what they find, each takes what lies on its own disk, and what
is incomplete stays for a job that has the missing hosts.
"""

import logging
import os
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tensorstore_ck.backend.staging import StagingFolder, StagingTier
from tensorstore_ck.common.ids import Digest, Ulid, ulid_text
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.format.record import decode_record, record_name
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.log import RefTable, SnapshotRow
from tensorstore_ck.session.group import Participant
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.publish_rounds import PublishRounds
from tensorstore_ck.session.save.staged_save import PublishAlone, StagedSave
from tensorstore_ck.session.save.staged_upload import StagedUpload
from tensorstore_ck.session.staging.manifest import Manifest, read_manifests
from tensorstore_ck.session.staging.outcome import published_as
from tensorstore_ck.session.staging.staged_chain import StagedLink
from tensorstore_ck.session.staging.staged_entries import clean_up, give_up

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_logger: Final = logging.getLogger("tensorstore_ck")
STALE_SECONDS: Final = 86_400
"""After this time no process stages the snapshot any more. Giving it up earlier would be safe, too."""
RESUME, PUBLISHED, LOST, WAIT = "resume", "published", "lost", "wait"


def find_manifests(engine: Engine, folder: StagingFolder) -> list[Manifest]:
    """The manifests of unpublished saves on this disk, oldest first; damaged ones are logged, and left where they are."""
    manifests, damaged = read_manifests(folder)
    for problem in damaged.values():
        _logger.warning("a staged snapshot cannot be continued: %s; see `%s`", problem, _list_command(engine))
    return manifests


def _list_command(engine: Engine) -> str:
    assert engine.tier is not None
    return shlex.join(["tsck", "staging", "--staging", os.path.dirname(engine.tier.folder.path), "-s", engine.backend.url])


def sweep(tier: StagingTier) -> None:
    """Deletes files of processes that ended before their save was staged. No other process may use the folder."""
    tier.folder.drop_temporaries()
    manifests, damaged = read_manifests(tier.folder)
    if not damaged:  # else the damaged manifest may name these files
        tier.uploader.drop(tier.folder.orphans({name for manifest in manifests for name in manifest.names}))


def resume_alone(context: SaveContext, tier: StagingTier) -> list[StagedSave]:
    """The saves that single processes left."""
    tier.folder.enter(lambda: sweep(tier))
    manifests = [manifest for manifest in find_manifests(context.engine, tier.folder) if manifest.ranks == 1 and manifest.lead]
    return [_resumed(context, [manifest]) for manifest in manifests if _claimed(tier.folder, [manifest])]


def resume_here(
    context: SaveContext, tier: StagingTier, is_wanted: Callable[[Sequence[Manifest]], bool] = lambda _: True
) -> list[StagedSave]:
    """The saves whose files are all on this disk, for a process that publishes saves that no job continues.

    `is_wanted` is called with the manifests of each snapshot, before anything is appended to the log.
    """
    tier.folder.enter(lambda: sweep(tier))
    by_txn: dict[Ulid, list[Manifest]] = {}
    for manifest in find_manifests(context.engine, tier.folder):
        by_txn.setdefault(manifest.txn, []).append(manifest)
    complete = [manifests for manifests in by_txn.values() if manifests[0].lead and len(manifests) == manifests[0].ranks]
    return [_resumed(context, manifests) for manifests in complete if _claimed(tier.folder, manifests) and is_wanted(manifests)]


def _claimed(folder: StagingFolder, manifests: Sequence[Manifest]) -> bool:
    """Whether this process may continue a save; False if another running process publishes it."""
    for number, manifest in enumerate(manifests):
        if not folder.claim(manifest.key):
            for claimed in manifests[:number]:
                folder.release(claimed.key)
            _logger.info("a running process publishes what was staged for %s at step %s; it is left to it", manifest.ref, manifest.step)
            return False
    return True


def _resumed(context: SaveContext, manifests: Sequence[Manifest]) -> StagedSave:
    first = manifests[0]
    assert first.lead is not None
    record = decode_record(first.lead.record, record_name(first.txn))
    upload = _found(context, txn=first.txn, ref=first.ref, root=record.root(), manifests=manifests)
    save = StagedSave(context, upload, PublishAlone(context, upload), first.step)
    save.announce_soon()
    return save


def _found(context: SaveContext, txn: Ulid, ref: str, root: Digest, manifests: Sequence[Manifest]) -> StagedUpload:
    """Puts a save of an earlier process into the order in which this handle publishes."""
    names = frozenset(name for manifest in manifests for name in manifest.names)
    context.fence.chain(ref).add(StagedLink(txn=txn, root=root, added={}, names=names, accepts=None))
    return StagedUpload(context, txn, ref, manifests)


def resume_ranks(context: SaveContext, tier: StagingTier, group: "ProcessGroup", timeout_seconds: float) -> list[StagedSave]:
    """The saves that groups of ranks left; all ranks of `group` call it."""
    own, _ = context.groups.of(group)
    title = "the search for what was staged before"
    here: dict[tuple[bytes, int], Manifest] = {}
    found: list[_FoundSave] = []

    def propose() -> Body:
        """Reads the disk here, so that its error is reported to all ranks."""
        manifests = [manifest for manifest in find_manifests(context.engine, tier.folder) if manifest.ranks > 1]
        here.update(((manifest.txn, manifest.rank), manifest) for manifest in manifests if _claimed(tier.folder, [manifest]))
        return {"found": [[*key, here[key].ranks] for key in sorted(here)]}

    def compare(proposals: list[Body]) -> Body:
        context.engine.log.sync()
        view = context.engine.log.view()
        verdicts = [_verdict(context.engine, view, txn, finders) for txn, finders in _finders(proposals).items()]
        return {"found": [verdict for _, verdict in sorted(verdicts, key=lambda verdict: verdict[0])]}

    def execute(go: Body) -> Body:
        context.engine.log.sync()
        for txn, verdict, owners in take(go, "found", list):
            mine = [here[txn, rank] for rank, finder in owners if finder == own.rank]
            others = [here[txn, rank] for rank, finder in owners if finder != own.rank and (txn, rank) in here]
            info = context.engine.log.view().staged(txn)
            if verdict == RESUME and info is not None:
                context.groups.publishing(group)  # its threads begin here, where an error is that of all ranks
                found.append(_FoundSave(info, mine, others))
            elif verdict in (PUBLISHED, LOST):
                for manifest in (*mine, *others):
                    clean_up(tier, manifest, published=verdict == PUBLISHED)
            else:
                for manifest in (*mine, *others):
                    tier.folder.release(manifest.key)
        return {}

    attempt = own.begin(title, object_id=title, timeout=timeout_seconds)
    try:
        attempt.run(Participant(propose=propose, execute=execute, resolve=None, compare=compare, commit=lambda _: {}))
        return [_resumed_by_ranks(context, group, save, timeout_seconds) for save in found]  # not before all ranks can publish them
    except BaseException:
        for manifest in here.values():
            tier.folder.release(manifest.key)
        raise


class _FoundSave(NamedTuple):
    """A save that the ranks of a group continue."""

    info: SnapshotRow
    mine: list[Manifest]
    """Those that this rank uploads."""
    copies: list[Manifest]
    """Those on this disk that other ranks upload."""


def _resumed_by_ranks(context: SaveContext, group: "ProcessGroup", found: _FoundSave, timeout_seconds: float) -> StagedSave:
    upload = _found(context, txn=found.info.ulid, ref=found.info.ref, root=found.info.root, manifests=found.mine)
    rounds = PublishRounds(context, upload, context.groups.publishing(group), timeout_seconds=timeout_seconds)
    return StagedSave(context, upload, rounds, found.info.step, copies=found.copies)


class _Finders(NamedTuple):
    """Where the manifests of one save were found."""

    ranks: int
    owners: dict[int, int]
    """Rank that staged -> the first rank that found the manifest."""


def _finders(proposals: Sequence[Body]) -> dict[bytes, _Finders]:
    finders: dict[bytes, _Finders] = {}
    for finder, proposal in enumerate(proposals):
        for txn, rank, ranks in take(proposal, "found", list):
            finders.setdefault(txn, _Finders(ranks, {})).owners.setdefault(rank, finder)
    return finders


def _verdict(engine: Engine, view: RefTable, txn: bytes, finders: _Finders) -> tuple[int, list[Any]]:
    """What to do with a save, by the log and by what is missing; and the number of its log entry, by which saves are ordered."""
    owners = [[rank, finder] for rank, finder in sorted(finders.owners.items())]
    if published_as(engine, view, Ulid(txn)) is not None:
        return 0, [txn, PUBLISHED, owners]
    staged = view.staged(txn)
    if staged is None:  # its ranks were stopped before all had staged; or another job is staging it now
        is_old = engine.clock() - int.from_bytes(txn[:6], "big") * 1_000_000 > STALE_SECONDS * 1_000_000_000
        is_over = view.outcome(txn) is not None or is_old
        if is_over:
            give_up(engine, Ulid(txn))
        return 0, [txn, LOST if is_over else WAIT, owners]
    missing = sorted(set(range(finders.ranks)) - finders.owners.keys())
    if missing:
        _logger.warning(
            "a snapshot that %d ranks staged (%s) cannot be published yet: no host here has the files of rank %s; see `%s`",
            finders.ranks,
            ulid_text(Ulid(txn)),
            ", ".join(map(str, missing[:16])),
            _list_command(engine),
        )
    return staged.n, [txn, WAIT if missing else RESUME, owners]
