"""From which snapshot a run resumes: the one rule of `TrainingState.restore`, `Checkpointer.resume` and every trainer's adapter.

A branch stands for its newest snapshot that is neither marked nor damaged. A warning names each snapshot that is skipped, and the one that
is tried instead. A store that cannot be read now is no damage: after a few tries its error is raised. Any other address (``ref@step``,
``ref~n``, a tag, a root) means its snapshot and no other one.

A save compares only a share of the replicas, in rotation: after one differed, later snapshots may contain the difference without a mark,
until a restore makes the ranks equal again. Runs on one rank, which informs the others.
"""

import json
import logging
import re
import shlex
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple, TypeVar

import torch.distributed as dist

from tensorstore_ck import errors
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.ids import SHOWN_ROOT_DIGITS
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.advise import NOTE
from tensorstore_ck.redaction import redacted
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.training.rank_group import ask_first_rank

OnDrift = Literal["accept", "skip"]
DRIFT: Final = "drift"
_MAX_COPIES: Final = 8
_REF: Final = re.compile(r"(?![0-9a-f]{8,64}$)[^@~]+")
"""A branch or tag without a step or ancestor: at the first start of a job it does not exist yet."""


class ResumeCandidate(NamedTuple):
    """The snapshot to resume from."""

    address: str = ""
    """Empty: no snapshot is usable. The head is named ``ref~0``, so that a restore takes the head at that time."""
    name: str = ""
    """Its address for messages, with the step."""
    is_new: bool = False
    """Whether there is no such branch or tag."""
    is_named: bool = False
    """Whether the given address means this snapshot and no other one."""
    drift: str = ""
    """Why the user must confirm the resume."""
    skipped: Sequence[tuple[str, str]] = ()
    """Newer snapshots that are marked: name and reason."""
    root: str = ""
    """The root of a branch's snapshot; empty for other addresses."""


def find_named(store: ReadOnlyStore, address: str) -> ResumeCandidate:
    """The snapshot at an address. Raises `NotFoundError` if the step, ancestor or root does not exist."""
    try:
        store.resolve(address)
    except NotFoundError:
        if _REF.fullmatch(address):
            return ResumeCandidate(is_new=True)
        raise
    return ResumeCandidate(address, address, is_named=True)


def choose(
    store: ReadOnlyStore, address: str, skipped: Collection[str], *, drift: OnDrift | None = None, allow_marked: bool = False
) -> ResumeCandidate:
    """The next snapshot to try: the newest usable one of a branch, or the one that any other address names.

    `skipped`: names of snapshots that cannot be restored. `drift`: see `Checkpointer.resume`. With `allow_marked`, marked ones are usable.
    """
    if not _REF.fullmatch(address) or address not in store.branches():
        return find_named(store, address)
    ref, history, marked = address, store.log(address), list[tuple[str, str]]()
    newest_of_step: dict[int | None, str] = {}
    for snapshot in history:
        newest_of_step.setdefault(snapshot.step, snapshot.root)
    for number, back in _line(history):
        snapshot = history[number]
        has_step = snapshot.step is not None and newest_of_step[snapshot.step] == snapshot.root
        name = f"{ref}@{snapshot.step}" if has_step else "" if back is None else f"{ref}~{back}"
        if not name or name in skipped:
            continue  # without a name, no address of it goes through the branch, so the run could not continue the branch
        if not allow_marked and snapshot.mark not in ("", DRIFT):
            marked.append((name, f"it is marked {snapshot.mark}"))
            continue
        address = f"{ref}~0" if number == 0 else name
        drifted = None if allow_marked or drift == "accept" else _drifted(store, history[number:])
        if drifted is None:
            return ResumeCandidate(address, name, skipped=marked, root=snapshot.root)
        reason = _describe(store, ref=ref, address=name, snapshot=snapshot, drifted=drifted)
        if drift is None:
            return ResumeCandidate(address, name, drift=reason, skipped=marked)
        marked.append((name, reason))
    return ResumeCandidate(skipped=marked)


def _line(history: Sequence[Snapshot]) -> Iterator[tuple[int, int | None]]:
    """The positions of a branch's head and of the snapshots that it comes from, and how many parents back each is, if all in between exist.

    Leaves out snapshots that a run left behind when it went back to an earlier one.
    """
    number, back = 0, 0 if history else None
    while number < len(history):
        yield number, back
        parent = history[number].parent
        parent_at = next((at for at in range(number + 1, len(history)) if history[at].root == parent), None)
        back = None if back is None or parent_at is None else back + 1
        number = number + 1 if parent_at is None else parent_at


def _drifted(store: ReadOnlyStore, history: Sequence[Snapshot]) -> Snapshot | None:
    """The first snapshot of a history if it is marked drift, else an earlier marked one of the same run."""
    newest, *before = history
    if newest.mark == DRIFT:
        return newest
    marked = [snapshot for snapshot in before if snapshot.mark == DRIFT]
    run = _run(store, newest) if marked else None
    return next((snapshot for snapshot in marked if run is not None and _run(store, snapshot) == run), None)


def _run(store: ReadOnlyStore, snapshot: Snapshot) -> tuple[object, object] | None:
    """Identifies the run, between two restores, that saved it; None if no `Checkpointer` saved it."""
    note = store.metadata(snapshot.root).get(NOTE)
    return (note.get("began_ns"), note.get("resumes")) if isinstance(note, dict) else None


def _describe(store: ReadOnlyStore, ref: str, address: str, snapshot: Snapshot, drifted: Snapshot) -> str:
    """Which tensors differ, on which ranks, and where both copies are."""
    what = f"{address} (step {snapshot.step}, {snapshot.root[:16]})"
    if drifted is snapshot:
        text = f"{what} is marked drift: {drifted.reason}"
    else:
        text = f"{what} comes from a run whose step {drifted.step} ({drifted.root[:16]}) is marked drift: {drifted.reason}"
    copies = _copies(store, drifted)
    return "; ".join(
        [text, *copies[:_MAX_COPIES], *([f"and {len(copies) - _MAX_COPIES} more copies"] if len(copies) > _MAX_COPIES else [])]
    )


def _copies(store: ReadOnlyStore, drifted: Snapshot) -> list[str]:
    """The copies that differing ranks have kept, in words."""
    lines = []
    prefix = f"{DRIFT}/{drifted.ref}/rank-"
    for branch in sorted((name for name in store.branches() if name.startswith(prefix)), key=lambda name: (len(name), name)):
        for copy in store.log(branch):
            note = store.metadata(copy.root).get(DRIFT) if copy.step == drifted.step else None
            if not isinstance(note, dict) or note.get("snapshot") != drifted.root:
                continue
            with store.open_snapshot(copy.root) as stored:
                names = stored.names()
            more = f" and {len(names) - _MAX_COPIES} more" if len(names) > _MAX_COPIES else ""
            lines.append(
                f"{', '.join(map(repr, names[:_MAX_COPIES]))}{more}: the snapshot {drifted.root[:16]} has the copy of rank "
                f"{note.get('written_by_rank')}, and rank {note.get('rank')}'s copy is at {branch} ({copy.root[:16]})"
            )
    return lines


T = TypeVar("T")
DAMAGES: Final = (errors.CorruptObjectError, errors.MissingObjectError, errors.SnapshotExpiredError)
"""Errors for which a snapshot is skipped. When ranks restore together, all raise the same class."""
TRIES: Final = 3
"""The number of tries after transient failures."""
PAUSE_SECONDS: Final = 5.0
MAX_NAMED: Final = 4
_logger: Final = logging.getLogger("tensorstore_ck")


class ResumeSearch:
    """One search, on one rank; all ranks of the group make the same calls, and get the same answers."""

    def __init__(
        self,
        store: "ReadOnlyStore",
        address: str,
        group: "dist.ProcessGroup | None",
        *,
        advice: str,
        missing: str = "",
        drift: OnDrift | None = None,
        allow_marked: bool = False,
        only_newest: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Finishes staged saves first.

        `advice` says how to accept a snapshot whose replicas had drifted apart, with ``{}`` for its address in quotes. `missing`: the
        error's text if there is nothing at the address; empty: a branch or tag may not exist yet. `only_newest`: take the newest snapshot
        of a branch or none. `drift`: see `Checkpointer.resume`; `allow_marked`: see `Store.checkout`.
        """
        if drift not in (None, "accept", "skip"):
            raise errors.InvalidOptionError(f'drift must be "accept" or "skip", not {drift!r}', object_id="drift")
        self._store, self._address, self._group = store, address, group
        self._advice, self._missing = advice, missing
        self._drift, self._allow_marked, self._only_newest, self._timeout_seconds = drift, allow_marked, only_newest, timeout_seconds
        self._candidate = ResumeCandidate()
        self._skipped: dict[str, str] = {}
        self._warned = 0
        self._announced = ""
        self._tries = 0
        self._has_tried = False
        store.finish_staged(address, group, timeout_seconds=timeout_seconds)

    def restore(self, restore: Callable[[str], T]) -> T | None:
        """The result of `restore` for the first snapshot that it can restore; None if there is no such branch or tag yet.

        Args:
            restore: Restores the snapshot at an address, on all ranks or on none.

        Raises:
            NotFoundError: the step, ancestor or root does not exist.
            SnapshotMarkedBadError: replicas had drifted apart, so that the user must choose.
            CorruptObjectError: none of the branch's snapshots can be restored.
            StoreError: what `restore` raised, if this is no damage, or the address names one snapshot.
        """
        while (address := self.next_address()) is not None:
            try:
                return restore(address)
            except errors.StoreError as exc:
                self.note_failure(exc)
        return None

    def next_address(self, *, announce: bool = True) -> str | None:
        """The snapshot to try next; None if there is no such branch or tag yet. One line of the log says which, unless the caller named it.

        `announce`: false if the caller does not restore it. Raises `StoreError`: see `restore`.
        """
        self._candidate = chosen = self._from_first()
        self._skipped |= dict(chosen.skipped)
        if chosen.is_new and self._missing:
            raise errors.NotFoundError(self._missing, object_id=self._address)
        if chosen.is_new:
            if announce and not self._only_newest:
                self._announce(f"nothing to resume: {self._address} has no snapshot yet")
            return None
        if not chosen.address:
            raise self._none_intact()
        if chosen.drift:
            raise errors.SnapshotMarkedBadError(
                f"{chosen.drift}. A rank may be corrupted: compare the copies, then {self._advice.format(repr(chosen.name))}",
                object_id=chosen.name,
            )
        self._warn_of_skipped(chosen.name)
        if announce and not chosen.is_named:
            self._announce(f"resuming from {chosen.name} (root {chosen.root[:SHOWN_ROOT_DIGITS]})")
        return chosen.address

    def note_failure(self, failure: errors.StoreError) -> None:
        """Notes that the snapshot of `next_address` could not be restored; returns if there is another to try.

        Raises:
            StoreError: `failure`.
        """
        if self._candidate.is_named:
            raise failure
        if isinstance(failure, DAMAGES):
            self._has_tried = True
            self.skip(str(failure))
        elif (failure.retry == "same" or isinstance(failure, errors.NotFoundError)) and self._tries + 1 < TRIES:
            self._tries += 1  # not found: the snapshot was deleted meanwhile
            time.sleep(PAUSE_SECONDS)
        else:
            raise failure

    def skip(self, reason: str) -> None:
        """Skips the snapshot of `next_address`."""
        self._skipped[self._candidate.name] = reason
        self._tries = 0

    def _from_first(self) -> ResumeCandidate:
        """The first rank's choice."""
        title = f"the resume from {self._address!r}, {len(self._skipped)} skipped"
        choose_here = partial(with_retries, lambda: json.dumps(self._choose()).encode())
        try:
            answer = ask_first_rank(self._store, self._group, title, choose_here, timeout_seconds=self._timeout_seconds)
        except (errors.InvalidNameError, errors.NotFoundError) as exc:
            if not self._missing:
                raise
            raise errors.NotFoundError(f"{self._missing}: {exc}", object_id=self._address) from exc
        return ResumeCandidate(*parse_json(answer))

    def _choose(self) -> ResumeCandidate:
        if self._only_newest:
            return find_named(self._store, self._address)
        return choose(self._store, self._address, self._skipped, drift=self._drift, allow_marked=self._allow_marked)

    def _announce(self, text: str) -> None:
        """Logs the text once, on the first rank. It is a warning, as for a new store, so that most jobs' logs show whether the job does
        what its user expects.
        """
        if text != self._announced and (self._group is None or self._group.rank() == 0):
            _logger.warning("%s in %s", text, redacted(self._store.url))
        self._announced = text

    def _warn_of_skipped(self, taken: str) -> None:
        for name, reason in list(self._skipped.items())[self._warned :]:
            warnings.warn(f"{name} was skipped: {reason}; resuming from {taken} instead", stacklevel=user_stacklevel())
        self._warned = len(self._skipped)

    def _none_intact(self) -> errors.CorruptObjectError:
        undefined = ", and the attempts left the state undefined" if self._has_tried else ""
        reasons = [f"{name}: {reason}" for name, reason in self._skipped.items()]
        more = f"; and {len(reasons) - MAX_NAMED} more" if len(reasons) > MAX_NAMED else ""
        return errors.CorruptObjectError(
            f"none of the snapshots of {self._address!r} can be restored{undefined}: {'; '.join(reasons[:MAX_NAMED])}{more}. Run "
            f"`tsck fsck --read-data -s {shlex.quote(self._store.url)}`; to start from the beginning, use another ref",
            object_id=self._address,
        )


def with_retries(value: Callable[[], T]) -> T:
    """The result of `value`; retries after transient failures."""
    for _ in range(TRIES - 1):
        try:
            return value()
        except errors.StoreError as exc:
            if exc.retry != "same":
                raise
            time.sleep(PAUSE_SECONDS)
    return value()
