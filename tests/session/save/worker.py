"""What one process does in the tests of processes, until it ends or is ended; and how such a process is started."""

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.utils.data import DataLoader, Dataset

import tensorstore_ck as tsck
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.session.group import Group
from tensorstore_ck.session.save import save_queue
from tensorstore_ck.session.save.save_queue import SaveQueue
from tests.effort import PATIENCE_SECONDS
from tests.end_to_end.crash.faulty import Faults, FaultyBackend
from tests.session.group.pool import rank_process
from tests.session.save.places import MIB, put_beside, state_of

dist: Any = torch.distributed
"""Its annotations lack most of what we use."""


class Started:
    """A process that plays a scene: forked where torch is loaded, it ends as an interpreter does. It writes to ``folder/stderr``."""

    def __init__(self, scene: Callable[..., None], folder: Path, *args: object) -> None:
        folder.mkdir(exist_ok=True)
        self._process = rank_process(_play, scene, str(folder), *args)
        self._process.start()
        self.pid = self._process.pid or 0

    def end(self) -> int:
        """Waits; its exit code, or minus the signal that ended it."""
        self._process.join(PATIENCE_SECONDS)
        code = self._process.exitcode
        self._process.kill()
        assert code is not None, "the process does not end"
        return code


def _play(scene: Callable[..., None], folder: str, *args: object) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    watch()
    scene(folder, *args)


def watch() -> None:
    """A process that hangs says where, and ends. A thread of Python's own: that of `faulthandler` does not survive a fork."""

    def end() -> None:
        faulthandler.dump_traceback()
        os._exit(99)

    timer = threading.Timer(PATIENCE_SECONDS / 2, end)
    timer.daemon = True
    timer.start()


def say(folder: str, **said: object) -> None:
    """In a file, a line each, in one write, which SIGKILL cannot tear."""
    fd = os.open(f"{folder}/said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(said).encode() + b"\n")
    os.close(fd)


def heard(folder: Path) -> list[dict[str, Any]]:
    """What it has said."""
    path = folder / "said"
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


class Trap(Faults):
    """Does something before or after the n-th call of a kind."""

    def __init__(self, prefix: str, number: int, do: Callable[[], object], *, after: bool = False) -> None:
        super().__init__()
        self._prefix = prefix
        self._left = number
        self._do = do
        self._after = after

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        is_here = what.startswith(self._prefix)
        self._left -= is_here
        strikes = is_here and self._left == 0
        if strikes and not self._after:
            self._do()
        result = effect()
        if strikes and self._after:
            self._do()
        return result


def open_store(folder: str, trap: Faults | None = None, *, cache: str = "cache", **options: Any) -> tsck.Store:
    store = tsck.open(f"{folder}/store", create=True, cache_dir=f"{folder}/{cache}", **options)
    if trap is not None:
        backend: Backend = FaultyBackend(store.engine.backend, trap, atomic_put=False)
        store.engine.backend = store.engine.log._writer.backend = backend
    return store


def tell_end(folder: str, pending: tsck.PendingSnapshot) -> None:
    pending.published.on_settled(lambda it: say(folder, published=it.step) if it.snapshot is not None else say(folder, lost=it.step))


# --- scenes: how a process ends -----------------------------------------------------------------------------------------


def in_flight(folder: str, how: str) -> None:
    """Three saves, of which none is stored before the interpreter has begun to end."""
    ends = threading.Event()

    def hold() -> None:
        assert ends.wait(PATIENCE_SECONDS)
        if how == "fails":
            raise BackendUnavailableError("injected")
        if how == "hangs":
            time.sleep(3600)

    if how == "hangs":
        vars(save_queue)["EXIT_SECONDS"] = 0.2
        assert SaveQueue.drain.__kwdefaults__ is not None
        SaveQueue.drain.__kwdefaults__["give_up_seconds"] = 0.2
    store = open_store(folder, Trap("put parts/", 1, hold))
    for step in (1, 2, 3):
        tell_end(folder, put_beside(store, step))
    threading._register_atexit(ends.set)  # type: ignore[attr-defined]
    if how == "raises":
        raise ZeroDivisionError("the training failed")
    if how == "exits":
        sys.exit(3)


def after_main(folder: str, has_saved: bool, in_thread: bool, starts: bool, is_staged: bool) -> None:
    """Saves that begin when the main thread has ended: of a thread that still trains, or of a callback of atexit.

    `starts`: as far as the interpreter still starts threads, which Python 3.12 does not.
    """

    def refuse(_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    store = open_store(folder, staging=f"{folder}/staging" if is_staged else None)
    if has_saved:
        tell_end(folder, put_beside(store, 1))

    def go_on() -> None:
        if in_thread:
            threading.main_thread().join()
        for step in (2, 3):
            tell_end(folder, put_beside(store, step))

    if in_thread:
        threading.Thread(target=go_on).start()
        if not starts:
            vars(threading)["_register_atexit"](lambda: setattr(threading.Thread, "start", refuse))
    else:
        threading._shutdown()  # type: ignore[attr-defined]  # as before atexit's callbacks
        go_on()


# --- scenes: preemption -------------------------------------------------------------------------------------------------


def killed(folder: str, prefix: str, number: int, after: bool) -> None:
    """Saves without end, until it is killed at a call of the backend."""
    trap = Trap(prefix, number, lambda: os.kill(os.getpid(), signal.SIGKILL), after=after)
    store = open_store(folder, trap, host_memory_bytes=6 * MIB)
    step = store.checkout("job")["step"] if "job" in store.branches() else 0
    while True:
        step += 1
        tell_end(folder, put_beside(store, step))


def preempted(folder: str, deadline_seconds: float) -> None:
    """A loop that asks, saves once more, and leaves."""
    store = open_store(folder)
    preemption = store.on_preemption(signal.SIGTERM, deadline_seconds=deadline_seconds)
    step = 0
    while not preemption.requested:
        step += 1
        put_beside(store, step, on_full="skip")
        say(folder, ready=step)
        time.sleep(0.01)
    assert 0 < preemption.seconds_left <= deadline_seconds
    put_beside(store, step + 1)
    report = preemption.finish()
    say(folder, last=step + 1, safe=report.safe and report.safe.step, dropped=len(report.dropped) + len(report.under_way))
    store.close()


def preempted_unawares(folder: str, deadline_seconds: float) -> None:
    """A loop that never asks."""
    store = open_store(folder)
    store.on_preemption(signal.SIGTERM, deadline_seconds=deadline_seconds)
    for step in (1, 2, 3):
        put_beside(store, step).wait()
    say(folder, ready=3)
    while True:
        time.sleep(0.01)


def preempted_child(folder: str) -> None:
    """A helper process of the job has inherited the handler, and is not the job."""
    store = open_store(folder)
    preemption = store.on_preemption(signal.SIGTERM, deadline_seconds=PATIENCE_SECONDS)
    context = multiprocessing.get_context("fork")
    is_up = context.Event()  # before that, Python would lose the signal

    def help_out() -> None:
        is_up.set()
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            time.sleep(0.01)  # Python handles a signal that comes right before a sleep after it

    helper = context.Process(target=help_out)
    helper.start()
    assert is_up.wait(PATIENCE_SECONDS / 4)
    helper.terminate()
    helper.join(PATIENCE_SECONDS / 4)
    say(folder, helper=helper.exitcode, requested=preemption.requested)
    if helper.exitcode is None:
        helper.kill()


# --- scenes: forks ------------------------------------------------------------------------------------------------------


def forked(folder: str, at: str) -> None:
    """A save is in the middle of something when the process forks; the child uses what it has inherited."""
    reached, goes = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        goes.wait(PATIENCE_SECONDS)

    store = open_store(folder, Trap(at, 5 if at == "append" else 2, hold))
    put_beside(store, 1).wait()
    pending = put_beside(store, 2)
    assert reached.wait(PATIENCE_SECONDS)
    pid = os.fork()
    if pid == 0:
        child(folder, store, pending)
        return  # and ends as an interpreter does, with the hooks that it has inherited
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    goes.set()
    say(folder, child=code, parent=pending.wait(PATIENCE_SECONDS).step, next=put_beside(store, 3).wait(PATIENCE_SECONDS).step)


def child(folder: str, store: tsck.Store, pending: tsck.PendingSnapshot) -> None:
    watch()
    try:
        pending.wait(1.0)
    except tsck.StoreError as exc:
        say(folder, waited=type(exc).__name__, message=str(exc))
    said = {
        "pending": len(store.pending()),
        "restored": store.checkout("job@1")["step"],
        "steps": [found.step for found in store.log("job")],
    }
    beside = put_beside(store, 10, ref="child").wait(PATIENCE_SECONDS)
    waited_for = store.put_snapshot(state_of(11), ref="child", step=11)
    store.close()
    say(folder, **said, put=[beside.step, waited_for.step])


class Reading(Dataset[int]):
    """Its workers are forked while saves are in flight; each looks at the store."""

    def __init__(self, store: tsck.Store) -> None:
        self._store = store

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index if index % 6 else index + 0 * len(self._store.branches())


def loading(folder: str) -> None:
    store = open_store(folder, host_memory_bytes=8 * MIB)
    pendings, total = [], 0
    for epoch in range(3):
        for number, batch in enumerate(DataLoader(Reading(store), batch_size=4, num_workers=2, multiprocessing_context="fork")):
            pendings.append(put_beside(store, 10 * epoch + number))
            total += int(batch.sum())
    say(folder, steps=[pending.wait(PATIENCE_SECONDS).step for pending in pendings], total=total)
    store.close()


# --- scenes: ranks ------------------------------------------------------------------------------------------------------


def one_of_ranks(folder: str, rank: int, ranks: int, victim: int, port: int) -> None:
    """One of them is killed in its second save, with a third in flight; the others learn of it, and go on as a new group."""
    assert Group.begin.__kwdefaults__ is not None
    Group.begin.__kwdefaults__["grace"] = 1.0
    server = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_SECONDS))
    dist.init_process_group("gloo", store=dist.PrefixStore("first", server), rank=rank, world_size=ranks)
    trap = Trap("put parts/", 2, lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == victim else None
    store = open_store(folder, trap, cache=f"cache-{rank}")
    began = time.monotonic()
    put_beside(store, 1, group=dist.group.WORLD).wait()
    slowest = torch.tensor(time.monotonic() - began)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    patience_seconds = max(1.5, 4 * slowest.item())
    said: dict[str, Any] = {}
    pendings = []
    for step in (2, 3):
        try:
            pendings.append(put_beside(store, step, group=dist.group.WORLD, timeout_seconds=patience_seconds))
        except tsck.StoreError as exc:  # rank 0 was killed before it decided about this save
            said[str(step)] = [type(exc).__name__, str(exc)]
    for pending in pendings:
        try:
            pending.wait(PATIENCE_SECONDS / 2)
        except tsck.StoreError as exc:
            said[str(pending.step)] = [type(exc).__name__, str(exc)]
    dist.destroy_process_group()
    left = [each for each in range(ranks) if each != victim]
    dist.init_process_group("gloo", store=dist.PrefixStore("second", server), rank=left.index(rank), world_size=len(left))
    said["root"] = put_beside(store, 4, group=dist.group.WORLD).wait(PATIENCE_SECONDS / 2).root
    store.close()
    say(folder, rank=rank, **said)
    os._exit(0)  # gloo's threads wait for who is gone


# --- scenes: what is used ------------------------------------------------------------------------------------------------


def resident_bytes(field: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def peak_over(action: Callable[[], object]) -> int:
    """How much more memory was resident at once during `action`."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    action()
    return resident_bytes("VmHWM") - before


def memory(folder: str) -> None:
    """The peak of saves under a budget of one copy; and of one that follows a smaller one that failed and is still held."""
    size = 48 * MIB
    with open_store(folder, host_memory_bytes=size, no_sync=True) as store:
        state = {"w": torch.ones(size // 4)}

        def train() -> None:
            for step in range(4):
                state["w"].add_(1)
                store.put_snapshot_async(state, ref="job", step=step)
            store.drain()

        say(folder, peak=peak_over(train), budget=size)
    trap = Trap("put parts/", 1, lambda: (_ for _ in ()).throw(BackendUnavailableError("injected")))
    with open_store(folder, trap, host_memory_bytes=2 * size, no_sync=True) as store:
        larger = {"w": torch.ones(size // 2)}

        def fail() -> None:
            failed = store.put_snapshot_async(state, ref="again")
            store.drain()
            try:
                failed.wait()
            except BackendUnavailableError:
                store.put_snapshot_async(larger, ref="again").wait()

        say(folder, peak=peak_over(fail), budget=2 * size)


def many(folder: str, puts: int) -> None:
    """Threads, descriptors and resident bytes, after a tenth of the saves and after all."""
    store, threads = open_store(folder, host_memory_bytes=8 * MIB, no_sync=True), threading.active_count()
    state: dict[str, Any] = {"w": torch.zeros(3000), "b": [bytearray(100)]}
    pendings = []
    for step in range(puts):
        state["w"].fill_(step)
        pending = store.put_snapshot_async(state, ref="job", step=step)
        if step % 100 in (3, 4):
            pending.cancel()
        pendings.append(pending)
        if step in (puts // 10, puts - 1):
            store.drain()
            while threading.active_count() > threads:
                time.sleep(0.01)
            say(folder, fds=len(os.listdir("/proc/self/fd")), resident=resident_bytes())
    say(folder, published=sum(pending.snapshot is not None for pending in pendings))
    store.close()
