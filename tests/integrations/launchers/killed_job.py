"""An example on a host that dies once, as its rank 1 begins to save a step or a later one: ``killed_job FOLDER STEP MODULE ARGUMENTS...``.

The host is that of the variable TESTS_HOST; a process without it lives. Unless TESTS_KILLS is "self", all processes with this TESTS_HOST
die, as if it lost its power. TESTS_READY: before its first step each process waits until that many have come so far.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import tensorstore_ck as tsck


def kill_host() -> None:
    """All processes of this host but this one."""
    variable = f"TESTS_HOST={os.environ['TESTS_HOST']}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        pid = int(environment.parent.name)
        try:
            if pid != os.getpid() and variable in environment.read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
        except OSError:  # it has ended, or is of another user
            continue


folder, step, module, *arguments = sys.argv[1:]
put, restore = tsck.TrainingState.put, tsck.TrainingState.restore


def killed(self: tsck.TrainingState, *args: Any, **options: Any) -> Any:
    dead = Path(folder) / "dead"
    if "TESTS_HOST" in os.environ and options["step"] >= int(step) and dist.get_rank() == 1 and not dead.exists():
        dead.touch()
        if os.environ.get("TESTS_KILLS") != "self":
            kill_host()
        os.kill(os.getpid(), signal.SIGKILL)
    return put(self, *args, **options)


def together(self: tsck.TrainingState, *args: Any, **options: Any) -> Any:
    found, ready = restore(self, *args, **options), Path(folder) / "ready"
    ready.mkdir(exist_ok=True)
    (ready / str(os.getpid())).touch()
    while len(list(ready.iterdir())) < int(os.environ.get("TESTS_READY", "0")):
        time.sleep(0.05)
    return found


tsck.TrainingState.put = killed  # type: ignore[method-assign]
tsck.TrainingState.restore = together  # type: ignore[method-assign]
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
