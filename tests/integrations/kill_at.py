"""Kills a process with -9 at a call of the backend, or at one that changes a folder."""

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.local_io import write_at
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.integrations.exporting import output_file
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store
from tests.end_to_end.crash.faulty import Faults, FaultyBackend

T = TypeVar("T")

_CHANGING: Final = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.symlink", "shutil.rmtree"}
"""Audit events; of ``open`` those that may write."""


class KillAt(Faults):
    """Kills the process at a call, counted while `is_counting`."""

    def __init__(self, at: int = 0, *, torn: bool = False) -> None:
        super().__init__()
        self._at, self._torn, self.is_counting = at, torn, False

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if self.is_counting:
            self.calls += 1
            if self.calls == self._at:
                if self._torn and tear is not None:
                    tear()
                os.kill(os.getpid(), signal.SIGKILL)
        return effect()


def kill_at_changes_of(folder: Path, faults: KillAt) -> None:
    """In a process of its own: `faults` also sees each call that changes something in the folder, by an export's writes too."""

    def see(path: object) -> None:
        if str(path).startswith(str(folder)):
            faults.call("", lambda: None)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.symlink":
            see(arguments[1])
        elif event in _CHANGING or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            see(arguments[0])

    def write(*arguments: Any) -> None:
        see(folder)
        write_at(*arguments)

    sys.addaudithook(audit)
    vars(output_file)["write_at"] = write


def open_killable(path: Path | str, faults: Faults) -> Store:
    """A store in a folder, made if it is absent, whose calls of the backend `faults` sees."""
    local = LocalBackend(str(path))
    config = read_config(local) or init_store(local)
    return Store(make_engine(FaultyBackend(local, faults, atomic_put=False), config, MemoryTable()))


def forked(work: Callable[[], T], folder: Path) -> T | None:
    """What `work` returns in a process of its own, through a file in `folder`; None if the process was killed."""
    folder.mkdir(exist_ok=True)
    returned = folder / "returned"
    returned.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads, and would wait for them
            returned.write_bytes(pickle.dumps(work()))
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a forked child must not go on with its parent's tests
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    assert status == 0, "the run failed by itself"
    result: T = pickle.loads(returned.read_bytes())
    return result
