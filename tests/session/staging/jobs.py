"""What the ranks of a job do, in processes of their own: each call is a job from its start to its end, with a store handle of its own."""

import logging
import threading
from contextlib import suppress
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.backend.staging import Uploader
from tensorstore_ck.errors import BackendUnavailableError, PermissionDeniedError, StoreError
from tensorstore_ck.log import RefTable
from tensorstore_ck.session.group import Group
from tensorstore_ck.session.save import publish_staged_group, resume_staged
from tests.session.group.pool import GROUPS
from tests.session.group.pool import TIMEOUT_SECONDS as SECONDS

ELEMENTS: Final = 40_000
DAY_SECONDS: Final = 86_400


class Job:
    """One rank's side of a job; a context manager."""

    def __init__(self, folder: str, ranks: int, disks: tuple[str, ...], *, stagger_seconds: float = 0.0) -> None:
        """`disks`: the staging folder of each rank."""
        self.rank = dist.get_rank()
        self.ranks = ranks
        self.group = GROUPS[ranks]
        staging = tsck.Staging(f"{folder}/{disks[self.rank]}", stagger_seconds=stagger_seconds)
        self._threads = set(threading.enumerate())
        self.store = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{self.rank}", staging=staging)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.store.drain(0)
        self.store.close()
        for thread in [each for each in threading.enumerate() if each.name == "tsck-group" and each not in self._threads]:
            thread.join(SECONDS)
            assert not thread.is_alive()

    def put(self, step: int) -> tsck.PendingSnapshot:
        start, stop = (ELEMENTS * each // self.ranks for each in (self.rank, self.rank + 1))
        state = {"w": tsck.FlatShard(tensor_of(step)[start:stop].clone(), (ELEMENTS,), start), "step": step}
        own = {"rank": self.rank, "step": step}
        return self.store.put_snapshot_async(state, ref="job", step=step, group=self.group, rank_state=own, timeout_seconds=SECONDS)

    def restore(self, address: str) -> int:
        """Which step is there: right in every byte."""
        start, stop = (ELEMENTS * each // self.ranks for each in (self.rank, self.rank + 1))
        into = {"w": tsck.FlatShard(torch.zeros(stop - start), (ELEMENTS,), start), "step": -1}
        found = self.store.checkout(address, into=into, group=self.group, timeout_seconds=SECONDS)
        assert torch.equal(found["w"].local, tensor_of(found["step"])[start:stop])
        return int(found["step"])

    def steps(self) -> list[int | None]:
        """What is published, oldest first."""
        return [snapshot.step for snapshot in reversed(self.store.log("job"))] if "job" in self.store.branches() else []


def tensor_of(step: int) -> torch.Tensor:
    return torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(step))


def leave_staged(folder: str, ranks: int, disks: tuple[str, ...], steps: tuple[int, ...]) -> list[int | None]:
    """Publishes step 0, and ends when these are staged."""
    with Job(folder, ranks, disks) as job:
        if not job.steps():
            job.put(0).wait(SECONDS)
    with Job(folder, ranks, disks, stagger_seconds=3600) as job:
        assert job.restore("job") == 0
        for step in steps:
            job.put(step).staged.wait(SECONDS)
        return [pending.step for pending in job.store.drain(0).staged]


def leave_while_one_publishes(folder: str, ranks: int, disks: tuple[str, ...], eager: int) -> tuple[int | None, list[tsck.PendingSnapshot]]:
    """All end when one rank waits for the others to publish what they staged: which step that is, and what is still under way then."""
    real, begun = Group.begin, threading.Event()

    def begin(self: Group, title: str, **options: Any) -> Any:
        if title.startswith("publishing"):
            begun.set()
        return real(self, title, **options)

    Group.begin = begin  # type: ignore[method-assign]
    try:
        with Job(folder, ranks, disks, stagger_seconds=0 if dist.get_rank() == eager else 3600) as job:
            job.restore("job")
            job.put(1).staged.wait(SECONDS)
            if job.rank == eager:
                assert begun.wait(SECONDS)
            (left,) = job.store.drain(0).staged
            return left.step, job.store.pending()
    finally:
        Group.begin = real  # type: ignore[method-assign]


def restore_both(folder: str, ranks: int, disks: tuple[str, ...], step: int) -> tuple[int, int, int | None, list[int | None]]:
    """What is staged, restored before it is published; then what is published, and a save on top."""
    with Job(folder, ranks, disks, stagger_seconds=1.0) as job:
        kinds: list[str] = []
        job.store.on_event(lambda event: kinds.append(event.kind))
        staged = job.restore("job^staged")
        published = job.restore("job")
        put = job.put(step).wait(SECONDS).step
        assert "retried" not in kinds
        return staged, published, put, job.steps()


def resume(
    folder: str, ranks: int, disks: tuple[str, ...], stale_seconds: int = resume_staged.STALE_SECONDS
) -> tuple[int, list[int | None], str]:
    """What is published when what was left has been gone on with, and what was logged."""
    told: list[str] = []
    resume_staged.STALE_SECONDS = stale_seconds  # type: ignore[misc]
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tensorstore_ck")
    logger.addHandler(handler)
    try:
        with Job(folder, ranks, disks) as job:
            return job.restore("job"), job.steps(), "\n".join(told)
    finally:
        logger.removeHandler(handler)
        resume_staged.STALE_SECONDS = DAY_SECONDS  # type: ignore[misc]


def cancel(folder: str, ranks: int, disks: tuple[str, ...], canceller: int) -> tuple[str, int | None]:
    """One rank cancels a staged save before its upload; then all save another one."""
    real, is_reached, is_decided = Uploader.upload, threading.Event(), threading.Event()

    def upload(self: Uploader, names: Any, **options: Any) -> None:
        if "on_retry" in options:
            is_reached.set()
            assert is_decided.wait(SECONDS)
        real(self, names, **options)

    Uploader.upload = upload  # type: ignore[method-assign]
    try:
        with Job(folder, ranks, disks) as job:
            job.restore("job")
            pending = job.put(1)
            pending.staged.wait(SECONDS)
            if job.rank == canceller:
                assert pending.cancel()
            is_decided.set()
            error = "published"
            try:
                pending.wait(SECONDS)
            except StoreError as exc:
                error = type(exc).__name__
            step = job.put(2).wait(SECONDS).step
            assert is_reached.is_set()
            return error, step
    finally:
        Uploader.upload = real  # type: ignore[method-assign]


def fail_all_tries(folder: str, ranks: int, disks: tuple[str, ...], failing: int) -> tuple[str, list[int | None]]:
    """One rank's upload is refused at each try of one save; then all save another one: the first error, and what is published."""
    real, left = Uploader.upload, [1] * publish_staged_group.TRIES if dist.get_rank() == failing else []

    def upload(self: Uploader, names: Any, **options: Any) -> None:
        if "on_retry" in options and left:
            left.pop()
            raise PermissionDeniedError("the token has expired")
        real(self, names, **options)

    Uploader.upload = upload  # type: ignore[method-assign]
    try:
        with Job(folder, ranks, disks) as job:
            job.restore("job")
            error = ""
            try:
                job.put(1).wait(SECONDS)
            except StoreError as exc:
                error = type(exc).__name__
            job.put(2).wait(SECONDS)
            return error, job.steps()
    finally:
        Uploader.upload = real  # type: ignore[method-assign]


def fail_once(folder: str, ranks: int, disks: tuple[str, ...], failing: int) -> tuple[list[str], list[int | None]]:
    """One rank's upload is refused once: which events there were."""
    real, left = Uploader.upload, [1] if dist.get_rank() == failing else []

    def upload(self: Uploader, names: Any, **options: Any) -> None:
        if "on_retry" in options and left:
            left.pop()
            raise PermissionDeniedError("the token has expired")
        real(self, names, **options)

    Uploader.upload = upload  # type: ignore[method-assign]
    try:
        with Job(folder, ranks, disks) as job:
            job.restore("job")
            kinds: list[str] = []
            job.store.on_event(lambda event: kinds.append(event.kind))
            job.put(1).wait(SECONDS)
            return kinds, job.steps()
    finally:
        Uploader.upload = real  # type: ignore[method-assign]


def die_before_the_log_knows(folder: str, ranks: int, disks: tuple[str, ...]) -> None:
    """All ranks end when all have staged, and rank 0 has not yet said so in the log."""
    from tensorstore_ck.session.staging import stage

    class EndedError(BaseException):
        pass

    def die(*_: object) -> None:
        raise EndedError

    from tensorstore_ck.session.group.rank_put import RankPut

    real = stage.announce, stage.StagingDestination.give_up, RankPut.resolve
    stage.announce = die  # type: ignore[assignment]
    stage.StagingDestination.give_up = lambda self: None  # type: ignore[method-assign]
    RankPut.resolve = lambda self, reason: None  # type: ignore[method-assign]
    try:
        with Job(folder, ranks, disks) as job:
            job.restore("job")
            with suppress(BaseException):
                job.put(1).wait(SECONDS)
    finally:
        stage.announce, stage.StagingDestination.give_up, RankPut.resolve = real  # type: ignore[method-assign]


def lose_the_log(folder: str, ranks: int, disks: tuple[str, ...]) -> str:
    """Rank 1 stages its side, learns no outcome and cannot ask the log: what that save raises."""
    from tensorstore_ck.session.group.channel import ChannelError
    from tensorstore_ck.session.group.rank_put import RankPut
    from tensorstore_ck.session.group.round import Round

    real = Round._wait_for_outcome, RankPut.resolve

    def lose(self: Round) -> Any:
        if not self._title.startswith("the save"):
            return real[0](self)
        real[0](self)
        self._grace = 0.0
        raise ChannelError("the connection is lost")

    def resolve(*_: object) -> Any:
        raise BackendUnavailableError("no answer")

    if dist.get_rank() == 1:
        Round._wait_for_outcome, RankPut.resolve = lose, resolve  # type: ignore[method-assign, assignment]
    try:
        with Job(folder, ranks, disks, stagger_seconds=DAY_SECONDS) as job:
            job.restore("job")
            pending = job.put(1)
            try:
                pending.staged.wait(SECONDS)
            except StoreError as exc:
                return type(exc).__name__
            return ""
    finally:
        Round._wait_for_outcome, RankPut.resolve = real  # type: ignore[method-assign]


def miss_what_was_published(folder: str, ranks: int, disks: tuple[str, ...]) -> str:
    """Rank 1 does not find in the log what rank 0 published: what that save raises."""
    real = publish_staged_group.PublishStagedGroup._conclude

    def conclude(self: publish_staged_group.PublishStagedGroup, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RefTable, "snapshot", lambda *_: None)
            return real(self, *args)

    if dist.get_rank() == 1:
        publish_staged_group.PublishStagedGroup._conclude = conclude  # type: ignore[method-assign, assignment]
    try:
        with Job(folder, ranks, disks) as job:
            job.restore("job")
            try:
                job.put(1).wait(SECONDS)
            except StoreError as exc:
                return type(exc).__name__
            return ""
    finally:
        publish_staged_group.PublishStagedGroup._conclude = real  # type: ignore[method-assign]
