"""What the ranks of a job do, in processes of their own: each call is a job from its start to its end, with a store handle of its own."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.backend.staging import Uploader
from tensorstore_ck.errors import BackendUnavailableError, PermissionDeniedError, StoreError
from tensorstore_ck.log import Log, RefTable
from tensorstore_ck.session.group import Group
from tensorstore_ck.session.group.channel import ChannelError
from tensorstore_ck.session.group.rank_save import RankSave
from tensorstore_ck.session.group.round import Round
from tensorstore_ck.session.save import resume_staged
from tensorstore_ck.session.save.publish_rounds import PublishRounds
from tensorstore_ck.session.staging import staging_destination
from tests.session.group.pool import GROUPS
from tests.session.group.pool import TIMEOUT_SECONDS as SECONDS

ELEMENTS: Final = 40_000
DAY_SECONDS: Final = 86_400


class Job:
    """One rank's side of a job; a context manager."""

    def __init__(self, folder: str, ranks: int, disks: tuple[str, ...]) -> None:
        """`disks`: the staging folder of each rank."""
        self.rank = dist.get_rank()
        self.ranks = ranks
        self.group = GROUPS[ranks]
        staging = tsck.Staging(f"{folder}/{disks[self.rank]}")
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

    def upload_later(self) -> None:
        """What is staged from now on is not uploaded before this job has ended."""
        engine = self.store.engine
        assert engine.tier is not None
        engine.tier = engine.tier._replace(options=replace(engine.tier.options, stagger_seconds=DAY_SECONDS))

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


@contextmanager
def patched(target: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile `call` is called instead of a method, with the method first."""
    with pytest.MonkeyPatch.context() as patch:
        real = getattr(target, name)
        patch.setattr(target, name, lambda *args, **options: call(real, *args, **options))
        yield


def error_of(pending: tsck.PendingSnapshot) -> str:
    """The class of what the wait raises."""
    try:
        pending.wait(SECONDS)
    except StoreError as exc:
        return type(exc).__name__
    return ""


def leave_staged(folder: str, ranks: int, disks: tuple[str, ...], steps: tuple[int, ...]) -> list[int | None]:
    """Publishes step 0, and ends when these are staged."""
    with Job(folder, ranks, disks) as job:
        job.put(0).wait(SECONDS)
        job.upload_later()
        for step in steps:
            job.put(step).staged.wait(SECONDS)
        return [pending.step for pending in job.store.drain(0).staged]


def leave_packs_staged(folder: str, ranks: int, disks: tuple[str, ...]) -> None:
    """Publishes step 0, and ends when step 1 is staged: small packs, too, are only on the disks then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging_destination, "SMALL_BYTES", 0)
        leave_staged(folder, ranks, disks, (1,))


def leave_while_one_publishes(folder: str, ranks: int, disks: tuple[str, ...], eager: int) -> tuple[int | None, list[tsck.PendingSnapshot]]:
    """All end when one rank waits for the others to publish what they staged: which step that is, and what is still under way then."""
    begun = threading.Event()

    def begin(real: Any, self: Group, title: str, **options: Any) -> Any:
        if title.startswith("publishing"):
            begun.set()
        return real(self, title, **options)

    with Job(folder, ranks, disks) as job:
        job.put(0).wait(SECONDS)
        if job.rank != eager:
            job.upload_later()
        with patched(Group, "begin", begin):
            job.put(1).staged.wait(SECONDS)
            if job.rank == eager:
                assert begun.wait(SECONDS)
        (left,) = job.store.drain(0).staged
        return left.step, job.store.pending()


def restore_both(folder: str, ranks: int, disks: tuple[str, ...], step: int) -> tuple[int, int, int | None, list[int | None]]:
    """What is staged, restored before it is published; then what is published, and a save on top."""
    is_restored = threading.Event()

    def upload(real: Any, self: Uploader, names: Any, **options: Any) -> Any:
        assert "on_retry" not in options or is_restored.wait(SECONDS)
        return real(self, names, **options)

    with patched(Uploader, "upload", upload), Job(folder, ranks, disks) as job:
        kinds: list[str] = []
        job.store.on_event(lambda event: kinds.append(event.kind))
        staged = job.restore("job^staged")
        is_restored.set()
        published = job.restore("job")
        put = job.put(step).wait(SECONDS).step
        assert "retried" not in kinds
        return staged, published, put, job.steps()


@contextmanager
def logged() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tensorstore_ck")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


def resume(
    folder: str, ranks: int, disks: tuple[str, ...], stale_seconds: int = resume_staged.STALE_SECONDS
) -> tuple[int, list[int | None], str]:
    """What is published when what was left has been gone on with, and what was logged."""
    with pytest.MonkeyPatch.context() as patch, logged() as told, Job(folder, ranks, disks) as job:
        patch.setattr(resume_staged, "STALE_SECONDS", stale_seconds)
        return job.restore("job"), job.steps(), "\n".join(told)


def resume_twice(folder: str, ranks: int, disks: tuple[str, ...], failing: int) -> tuple[str, int, list[int | None], list[str]]:
    """The error of a restore for which one rank cannot read the log; what the next one finds, what is published then, and the events."""
    left = [1] if dist.get_rank() == failing else []

    def sync(real: Any, *args: Any, **options: Any) -> Any:
        if left:
            left.pop()
            raise BackendUnavailableError("no answer")
        return real(*args, **options)

    with Job(folder, ranks, disks) as job:
        kinds: list[str] = []
        job.store.on_event(lambda event: kinds.append(event.kind))
        with patched(Log, "sync", sync), pytest.raises(tsck.SnapshotAbortedError) as refused:
            job.restore("job")
        return str(refused.value), job.restore("job"), job.steps(), kinds


def resume_and_put(folder: str, ranks: int, disks: tuple[str, ...], step: int) -> tuple[list[int | None], str]:
    """What is published when what was left has ended, and another save; and what was logged."""
    with logged() as told, Job(folder, ranks, disks) as job:
        job.restore("job")
        job.put(step).wait(SECONDS)
        return job.steps(), "\n".join(told)


def cancel(folder: str, ranks: int, disks: tuple[str, ...], canceller: int) -> tuple[str, int | None]:
    """One rank cancels a staged save before its upload; then all save another one."""
    is_reached, is_decided = threading.Event(), threading.Event()

    def upload(real: Any, self: Uploader, names: Any, **options: Any) -> Any:
        if "on_retry" in options:
            is_reached.set()
            assert is_decided.wait(SECONDS)
        return real(self, names, **options)

    with Job(folder, ranks, disks) as job:
        job.put(0).wait(SECONDS)
        with patched(Uploader, "upload", upload):
            pending = job.put(1)
            pending.staged.wait(SECONDS)
            if job.rank == canceller:
                assert pending.cancel()
            is_decided.set()
            error = error_of(pending)
            step = job.put(2).wait(SECONDS).step
        assert is_reached.is_set()
        return error, step


def refuse_uploads(folder: str, ranks: int, disks: tuple[str, ...], failing: int, times: int) -> tuple[str, list[str], list[int | None]]:
    """One rank's upload of one save is refused so many times; then all save another one: the error, the events, and what is published."""
    left = [1] * times if dist.get_rank() == failing else []

    def upload(real: Any, self: Uploader, names: Any, **options: Any) -> Any:
        if "on_retry" in options and left:
            left.pop()
            raise PermissionDeniedError("the token has expired")
        return real(self, names, **options)

    with Job(folder, ranks, disks) as job:
        job.put(0).wait(SECONDS)
        kinds: list[str] = []
        job.store.on_event(lambda event: kinds.append(event.kind))
        with patched(Uploader, "upload", upload):
            error = error_of(job.put(1))
        job.put(2).wait(SECONDS)
        return error, kinds, job.steps()


def die_before_the_log_knows(folder: str, ranks: int, disks: tuple[str, ...]) -> None:
    """All ranks end when all have staged, and rank 0 has not yet said so in the log."""

    class EndedError(BaseException):
        pass

    def die(*_: object) -> None:
        raise EndedError

    with Job(folder, ranks, disks) as job:
        job.put(0).wait(SECONDS)
        with (
            patched(staging_destination, "announce", die),
            patched(staging_destination.StagingDestination, "give_up", lambda *_: None),
            patched(RankSave, "resolve", lambda *_: None),
            suppress(BaseException),
        ):
            job.put(1).wait(SECONDS)


def lose_the_log(folder: str, ranks: int, disks: tuple[str, ...]) -> str:
    """Rank 1 stages its side, learns no outcome and cannot ask the log: what that save raises."""

    def lose(real: Any, self: Round) -> Any:
        found = real(self)
        if dist.get_rank() != 1 or not self._title.startswith("the save"):
            return found
        self._grace = 0.0
        raise ChannelError("the connection is lost")

    def resolve(real: Any, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise BackendUnavailableError("no answer")
        return real(*args)

    with Job(folder, ranks, disks) as job:
        job.put(0).wait(SECONDS)
        job.upload_later()
        with patched(Round, "_wait_for_outcome", lose), patched(RankSave, "resolve", resolve):
            pending = job.put(1)
            try:
                pending.staged.wait(SECONDS)
            except StoreError as exc:
                return type(exc).__name__
            return ""


def miss_what_was_published(folder: str, ranks: int, disks: tuple[str, ...]) -> str:
    """Rank 1 does not find in the log what rank 0 published: what that save raises."""

    def conclude(real: Any, *args: Any) -> Any:
        with patched(RefTable, "snapshot", lambda *_: None) if dist.get_rank() == 1 else nullcontext():
            return real(*args)

    with Job(folder, ranks, disks) as job, patched(PublishRounds, "_conclude", conclude):
        return error_of(job.put(0))
