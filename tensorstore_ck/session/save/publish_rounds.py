"""The second step of a staged save of many ranks: each uploads its files, and rank 0 publishes for all.

A rank uploads by its own manifest or, after a crash, by those that it found on its disk. Then the ranks' publishing threads meet, again and
again if ranks or the store do not answer in time. The log decides: a round that was aborted never publishes, and a staged snapshot is
published once or given up. An object that a rank's disk damaged is replaced in a round of its own: a rank of another host that keeps a copy
uploads it.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.backend.staging.unsent_file import StagedDamageError
from tensorstore_ck.common.ids import Ulid, ulid_text
from tensorstore_ck.errors import (
    BackendUnavailableError,
    ConflictError,
    MissingObjectError,
    SnapshotAbortedError,
    SnapshotDroppedError,
    SnapshotExpiredError,
    StoreError,
)
from tensorstore_ck.format.sealed import Body, take
from tensorstore_ck.log import Op, RefTable, SnapshotRow
from tensorstore_ck.session.group import Group, Participant
from tensorstore_ck.session.group.common_store import require_common_store
from tensorstore_ck.session.peers.copy_holders import host_of_folder
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.save_status import SaveStatus
from tensorstore_ck.session.save.staged_upload import StagedUpload
from tensorstore_ck.session.staging.manifest import Manifest, decode_lead, encode_lead
from tensorstore_ck.session.staging.outcome import published_as
from tensorstore_ck.session.staging.renew import RenewedParts
from tensorstore_ck.session.staging.staged_entries import give_up

TRIES: Final = 5


class Healing(NamedTuple):
    """Rank 0's plan for a damaged object."""

    name: str
    """The object; empty if none is damaged."""
    healer: int
    """The rank that uploads its copy; -1 if no rank has one."""
    reason: str
    """Why the save is lost if it is not healed."""


NOT_DAMAGED = Healing("", -1, "")


def report_damage(tier: StagingTier, txn: Ulid, manifests: Sequence[Manifest], damage: StagedDamageError | None) -> Body:
    """The object that this rank cannot send, if any, and the ranks whose files lie on its host."""
    prefix = f"{ulid_text(txn)}-"
    holds = [int(key.removeprefix(prefix)) for key in tier.folder.list_manifests() if key.startswith(prefix)]
    name = "" if damage is None else damage.object_id
    owner = next((manifest.rank for manifest in manifests if name in manifest.names), -1)
    return {"host": host_of_folder(tier.folder.path), "holds": holds, "name": name, "owner": owner, "reason": str(damage or "")}


def plan_healing(reports: Sequence[Body], healed: Collection[str]) -> Healing:
    """The rank that replaces the first damaged object; none if it was `healed` before."""
    for broken in reports:
        name, owner = take(broken, "name", str), take(broken, "owner", int)
        if name:
            others = (
                rank for rank, report in enumerate(reports) if report["host"] != broken["host"] and owner in take(report, "holds", list)
            )
            return Healing(name, -1 if name in healed else next(others, -1), take(broken, "reason", str))
    return NOT_DAMAGED


def heal(tier: StagingTier, planned: Healing, rank: int, stop: Callable[[], object]) -> str:
    """Uploads this rank's copy if that is planned. If the object, and so the save, is lost, returns why."""
    if planned.name and planned.healer < 0:
        return planned.reason
    if planned.healer == rank:
        try:
            tier.uploader.upload([planned.name], stop=stop)
        except (StagedDamageError, MissingObjectError):
            return planned.reason
    return ""


class PublishRounds:
    """The rounds in which the ranks of a group publish a staged save: see `PublishAlone`."""

    is_alone = False

    def __init__(self, context: SaveContext, upload: StagedUpload, group: Group, *, timeout_seconds: float) -> None:
        self.rank = group.rank
        self.ref = upload.ref
        self._context = context
        self._upload = upload
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._healed: set[str] = set()
        """The damaged objects that were replaced, on rank 0."""

    def gives_up_alone(self, status: SaveStatus) -> bool:
        """Ranks give up together, except one whose process ends."""
        return status.dropped == "abandoned"

    def publish(self, status: SaveStatus) -> SnapshotRow | StoreError:
        """See `PublishAlone`.

        Raises:
            SnapshotAbortedError: ranks did not come in any round.
        """
        tries_left = TRIES
        while True:
            outcome = self._try(status, self._upload_problem(status), is_last=tries_left == 1)
            if outcome is None:
                tries_left -= 1
            elif "healed" not in outcome:
                return self._conclude(outcome, status)

    def _upload_problem(self, status: SaveStatus) -> StoreError | None:
        """Uploads this rank's files; returns an error, so that it reaches the other ranks, which would wait otherwise."""
        try:
            if not status.dropped:
                self._upload.upload(status, lambda: _check_abandoned(status))
        except StoreError as exc:
            if status.dropped == "abandoned":
                raise
            return None if status.dropped else exc
        return None

    def _try(self, status: SaveStatus, problem: StoreError | None, *, is_last: bool) -> Body | None:
        """Runs one round: returns what became of the staged snapshot, or of a damaged object of it; None if all ranks must try again.

        The log decides the outcome of a round, so no rank goes on to the next one before the log has answered.
        """
        title = f"publishing what was staged for {self.ref!r}"

        def sleep(seconds: float) -> None:
            time.sleep(seconds)
            _check_abandoned(status)

        attempt = self._group.begin(title, object_id=self.ref, timeout=self._timeout_seconds, sleep=sleep)
        try:
            return attempt.run(self._participant(status, attempt.txn, problem))
        except StoreError as exc:
            if status.dropped == "abandoned":
                raise
            outcome = self._context.retry_until_dropped(status, "the log entry of what was staged", lambda: self._resolve(attempt.txn))
            if outcome is None and is_last:
                raise
            if outcome is None:
                self._context.retried(status, "publishing what was staged", exc, 0.0)
            return outcome

    def _participant(self, status: SaveStatus, txn: Ulid, problem: StoreError | None) -> Participant:
        def propose() -> Body:
            damage = problem if isinstance(problem, StagedDamageError) else None
            if problem is not None and damage is None:
                raise problem
            if status.dropped == "abandoned":
                status.check()
            return {
                "txn": self._upload.txn,
                "cancelled": status.dropped,
                "lead": None if self._upload.lead is None else encode_lead(self._upload.lead),
                "renewed": [[rank, parts.record()] for rank, parts in self._upload.renewed.items()],
                "disk": report_damage(self._upload.tier, self._upload.txn, self._upload.manifests, damage),
            }

        def compare(proposals: list[Body]) -> Body:
            if len({take(proposal, "txn", bytes) for proposal in proposals}) > 1:
                raise SnapshotAbortedError("the ranks have staged different snapshots", object_id=self.ref)
            encoded = next((proposal["lead"] for proposal in proposals if proposal.get("lead") is not None), None)
            if encoded is None:
                raise SnapshotAbortedError("no rank has the manifest that rank 0 staged", object_id=self.ref)
            self._upload.lead = decode_lead(encoded)
            for proposal in proposals:
                self._upload.renewed |= {int(rank): RenewedParts.of_record(parts) for rank, parts in take(proposal, "renewed", list)}
            cancelled = next((reason for proposal in proposals if (reason := take(proposal, "cancelled", str))), "")
            healing = NOT_DAMAGED if cancelled else plan_healing([take(proposal, "disk", dict) for proposal in proposals], self._healed)
            return {"cancelled": cancelled, "healing": list(healing)}

        def execute(go: Body) -> Body:
            healing = Healing(*take(go, "healing", list))
            lost = heal(self._upload.tier, healing, self.rank, lambda: _check_abandoned(status))
            return {"cancelled": take(go, "cancelled", str), "lost": lost, "healed": healing.name}

        def commit(results: list[Body]) -> Body:
            cancelled, healed = take(results[0], "cancelled", str), take(results[0], "healed", str)
            lost = f"it was {cancelled}" if cancelled else next((reason for result in results if (reason := take(result, "lost", str))), "")
            if lost:
                return self._lost(lost)
            if healed:
                self._healed.add(healed)
                return {"healed": healed}
            try:
                with status.meter.timed("commit"):
                    if not self._group.has_common_store:
                        require_common_store(self._context.engine, [part.ulids[0] for part in self._upload.parts()], self._group.in_job)
                        self._group.has_common_store = True
                    self._upload.append(txn)
            except ConflictError as exc:
                return self._lost(str(exc))
            except SnapshotExpiredError as exc:
                if not self._upload.is_lost:
                    raise  # in the next round the ranks use new names for the objects that gc freed
                return self._lost(str(exc))
            return {}

        return Participant(propose=propose, execute=execute, resolve=lambda: self._resolve(txn), compare=compare, commit=commit)

    def _resolve(self, txn: Ulid) -> Body | None:
        """Aborts a round unless it was decided; returns what became of the staged snapshot."""

        def build(view: RefTable) -> list[Op]:
            return [] if view.outcome(txn) is not None or self._state(view) is not None else [Op.abort(txn)]

        self._context.engine.log.append(build)
        return self._state(self._context.engine.log.view())

    def _lost(self, reason: str) -> Body:
        published = give_up(self._context.engine, self._upload.txn)
        return {"lost": reason} if published is None else {}

    def _state(self, view: RefTable) -> Body | None:
        """The outcome in the log: published ({}), given up, or neither yet (None)."""
        if published_as(self._context.engine, view, self._upload.txn) is not None:
            return {}
        return {"lost": "the log says that it was given up"} if view.outcome(self._upload.txn) is not None else None

    def _conclude(self, outcome: Body, status: SaveStatus) -> SnapshotRow | StoreError:
        if "lost" in outcome:
            return SnapshotAbortedError(f"the save to {self.ref!r} was staged, but not published: {outcome['lost']}", object_id=self.ref)
        self._context.retry_until_dropped(status, "the log", self._context.engine.log.sync)
        info = published_as(self._context.engine, self._context.engine.log.view(), self._upload.txn)
        if info is None:
            raise BackendUnavailableError(
                f"this rank does not see the snapshot that was published for {self.ref!r}: do all ranks open one store?",
                object_id=self.ref,
            )
        return info


def _check_abandoned(status: SaveStatus) -> None:
    if status.dropped == "abandoned":
        raise SnapshotDroppedError(f"the upload of {status} was given up; it stays on the staging disk", object_id=status.ref)
