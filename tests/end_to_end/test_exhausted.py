"""A host without memory or threads: the save ends with a clear error, or goes on more slowly; the handle goes on, and nothing is lost."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.backend.staging.unsent_file import UnsentFile
from tensorstore_ck.common.threads import Helper, for_each, shielded
from tensorstore_ck.common.waiting import Changes
from tensorstore_ck.session.save.queued_save import Worker
from tests.effort import PATIENCE_SECONDS, effort
from tests.end_to_end.interrupting import PACKAGE
from tests.end_to_end.test_interrupts import Job

TRIALS = 25


class NoMemory:
    """The `at`-th call of a function of the package, in any thread, has no memory for its frame; 0: none. `calls` counts those made."""

    def __init__(self, at: int) -> None:
        self.calls = 0
        self.where = ""
        self._at = at

    def __enter__(self) -> "NoMemory":
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        threading.settrace(None)
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        self.calls += 1
        if self.calls == self._at:
            self.where = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
            raise MemoryError


@pytest.mark.slow
@pytest.mark.race
@pytest.mark.timeout(effort(usual=600, soak=7200))
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a thread that died before it began
@pytest.mark.parametrize("is_staged", [False, True], ids=["store", "staging"])
@pytest.mark.parametrize("call", [Job.put, Job.wait])
def test_no_memory_at_any_call(tmp_path: Path, call: Callable[[Job], object], *, is_staged: bool) -> None:
    """Of capture, write, upload and publication, in each of their threads."""
    job = Job(tmp_path, is_staged=is_staged)
    call(job)
    with NoMemory(0) as counted:
        call(job)
    for at in range(1, counted.calls + 1, effort(usual=max(1, counted.calls // TRIALS), soak=1 + 6 * is_staged)):
        with NoMemory(at) as struck:
            try:
                call(job)
            except (tsck.StoreError, MemoryError) as exc:
                error: BaseException | None = exc
            else:
                error = None
        try:
            assert error is None or isinstance(error, tsck.StoreError) or "MemoryError" in type(error).__name__
            job.store.drain(PATIENCE_SECONDS)
            job.require_sound()
        except Exception as exc:
            exc.add_note(f"after call {at} had no memory, {struck.where}: {error!r}")
            raise
    job.close()


def test_a_thread_of_the_queue_has_no_memory_for_its_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, run, failed = Job(tmp_path, is_staged=True), Worker._run, list[str]()

    def run_the_second_time(self: Worker[object]) -> None:
        if self._name not in failed:
            failed.append(self._name)
            raise MemoryError
        run(self)

    monkeypatch.setattr(Worker, "_run", run_the_second_time)
    job.wait()
    job.require_sound()
    assert failed
    job.close()


@pytest.mark.parametrize("failing_turn", [1, 2], ids=["before its start returns", "after its work"])
def test_a_thread_of_the_queue_has_no_memory_for_a_turn(monkeypatch: pytest.MonkeyPatch, failing_turn: int) -> None:
    """It takes another turn; what it has worked on is not reported as failed: another thread may have it by then."""
    plain_next, plain_start = Worker._next, Helper.start
    turns, ended, has_turned = list[int](), list[str](), threading.Event()

    def next_with_no_memory_once(self: Worker[str]) -> str | None:
        turns.append(len(turns) + 1)
        has_turned.set()
        if turns[-1] == failing_turn:
            raise MemoryError
        return plain_next(self)

    def start_and_see_a_turn(self: Helper) -> None:
        plain_start(self)
        assert has_turned.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(Worker, "_next", next_with_no_memory_once)
    monkeypatch.setattr(Helper, "start", start_and_see_a_turn)
    changed = Changes()
    worker = Worker("queue", changed, ended.append, lambda item, exc: ended.append(f"{item}: {type(exc).__name__}"))
    worker.put("item")
    assert changed.wait_for(lambda: worker.thread is None, PATIENCE_SECONDS)
    assert ended == ["item"]


def test_a_thread_of_the_queue_has_no_memory_to_note_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it worked on ends with an error, and the next item is worked on."""
    ended, note = list[str](), Worker._note_broken
    changed = Changes()

    def work(item: str) -> None:
        if item == "first":
            monkeypatch.setattr(Worker, "_note_broken", no_memory)
            raise MemoryError
        ended.append(item)

    def no_memory(self: Worker[str], exc: BaseException) -> None:
        monkeypatch.setattr(Worker, "_note_broken", note)
        raise MemoryError

    worker = Worker("queue", changed, work, lambda item, exc: ended.append(f"{item}: {type(exc).__name__}"))
    for item in ("first", "second"):
        worker.put(item)
    assert changed.wait_for(lambda: worker.thread is None, PATIENCE_SECONDS)
    assert ended == ["first: MemoryError", "second"]


@contextmanager
def no_thread(from_the: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """From this start of a thread on, none can be started; yields the names of those that were asked for."""
    plain, names = threading.Thread.start, list[str]()

    def start(self: threading.Thread) -> None:
        names.append(self.name)
        if len(names) >= from_the:
            raise RuntimeError("can't start new thread")
        plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield names


@pytest.mark.parametrize("is_staged", [False, True], ids=["store", "staging"])
def test_no_thread_from_any_start_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_staged: bool) -> None:
    """Saves, restores and gc go on with the threads that there are, if only the one that calls."""
    job = Job(tmp_path, is_staged=is_staged)
    for call in (Job.put, Job.wait, Job.restore, Job.gc):
        with no_thread(sys.maxsize, monkeypatch) as names:
            call(job)
        for from_the in range(1, len(names) + 1, effort(usual=max(1, len(names) // 2), soak=1)):
            with no_thread(from_the, monkeypatch):
                call(job)
            job.acknowledged.add(job.step)
        job.require_sound()
    job.close()


def test_what_is_called_here_for_want_of_a_thread_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first thread cannot be started: one for the inner call would wait for the lock that this thread holds."""
    plain, lock, failures = threading.Thread.start, threading.RLock(), [RuntimeError("can't start new thread")]

    def start(self: threading.Thread) -> None:
        if failures:
            raise failures.pop()
        plain(self)

    def inner() -> bool:
        return lock.acquire(timeout=PATIENCE_SECONDS)

    def outer() -> bool:
        with lock:
            return shielded(inner)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert shielded(outer)


def test_a_thread_that_dies_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of too little memory: `threading.Thread.start` would wait for it permanently."""

    def die(self: threading.Thread) -> None:
        raise SystemExit

    called = list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(Helper, "_bootstrap", die)
        helper = Helper(lambda: called.append(0), "tsck-test", begin_seconds=0.01)
        with pytest.raises(RuntimeError, match="tsck-test did not begin"):
            helper.start()
        helper.end()
    helper.run()
    assert called == [], "given up, it never begins"


def test_fewer_threads_do_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[int]()
    with no_thread(3, monkeypatch) as names:
        for_each(range(100), done.append, 8)
    assert sorted(done) == list(range(100))
    assert names == ["tsck"] * 3


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes")])
@pytest.mark.parametrize("call", [Job.put, Job.wait])
def test_a_failed_allocation_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Job], object], error: Exception
) -> None:
    job = Job(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("tensorstore_ck.engine.write.write_and_commit.write_part", fail)
        with pytest.raises(tsck.NoSpaceError, match=r"ran out of host memory .*: free memory on this host"):
            call(job)
    job.require_sound()
    job.close()


def test_an_upload_that_cannot_close_its_file_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next try takes its own lock for another process's, and waits without end."""
    job = Job(tmp_path, is_staged=True)

    def fail(_: UnsentFile) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(UnsentFile, "close", fail)
        with pytest.raises(tsck.NoSpaceError):
            job.wait()
    job.require_sound()
    assert {each.step for each in job.store.log("job")} == set(range(1, job.step + 1)), "the save that failed stayed on the disk"
    job.close()
