"""An example of which rank 1 dies once, as it begins the save of a step: ``killed_job FOLDER STEP MODULE ARGUMENTS...``.

Unless the variable TESTS_KILLS is "self", it dies with its host, as if that lost its power: with all processes whose TESTS_HOST is its own.
"""

import os
import runpy
import signal
import sys
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
put = tsck.TrainingState.put


def killed(self: tsck.TrainingState, *args: Any, **options: Any) -> Any:
    dead = Path(folder) / "dead"
    if options["step"] == int(step) and dist.get_rank() == 1 and not dead.exists():
        dead.touch()
        if os.environ.get("TESTS_KILLS") != "self":
            kill_host()
        os.kill(os.getpid(), signal.SIGKILL)
    return put(self, *args, **options)


tsck.TrainingState.put = killed  # type: ignore[method-assign]
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
