"""Which process this is, and whether another one has surely ended. Linux only: elsewhere nothing is known.

A process id means nothing on another host, in another PID namespace or after a reboot, and is reused. So an identity contains all of
these, and the time at which the process started (proc_pid_stat(5), field 22).
"""

import os
from pathlib import Path
from typing import Final, NamedTuple

ROOT_PID_NAMESPACE: Final = "pid:[4026531836]"
"""PROC_PID_INIT_INO of Linux (include/linux/proc_ns.h): the namespace of the host itself, outside all containers."""
_PROC: Final = Path("/proc")


class Process(NamedTuple):
    """The identity of a process among those of all hosts."""

    host: str
    """Host name and machine id."""
    boot_id: str
    """Drawn by the kernel at each boot."""
    pid_namespace: str
    pid: int
    start_ticks: int
    """When it started, in clock ticks since the boot."""


class _Status(NamedTuple):
    start_ticks: int
    has_ended: bool


def this_process() -> Process | None:
    """The calling process; None where the system does not report all of it."""
    try:
        machine_id = Path("/etc/machine-id").read_text(encoding="ascii").strip() if os.path.exists("/etc/machine-id") else ""
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink(_PROC / "self/ns/pid")
        status = _status(os.getpid())
    except (OSError, ValueError):
        return None
    return Process(
        host=f"{os.uname().nodename}/{machine_id}",
        boot_id=boot_id,
        pid_namespace=namespace,
        pid=os.getpid(),
        start_ticks=status.start_ticks,
    )


def has_ended(process: Process, us: Process) -> bool:
    """Whether `process` has surely ended, as seen from `us`; False if unknown."""
    if process.host != us.host:
        return False
    if process.boot_id != us.boot_id:
        # Containers on several hosts may share a name and a machine id: only the host itself knows that it was rebooted.
        return not us.host.endswith("/") and {process.pid_namespace, us.pid_namespace} == {ROOT_PID_NAMESPACE}
    if process.pid_namespace != us.pid_namespace:
        return False
    try:
        os.kill(process.pid, 0)  # unlike /proc, it is the same for every user
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    try:
        status = _status(process.pid)
    except (OSError, ValueError):
        return False
    return status.has_ended or status.start_ticks != process.start_ticks


def _status(pid: int) -> _Status:
    """From `/proc`.

    Raises:
        OSError, ValueError: `/proc` does not show the process.
    """
    text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()  # the name in parentheses may contain anything
    state, threads, start_ticks = fields[0], int(fields[17]), int(fields[19])
    # A zombie waits for its parent. Other threads may still run after the first one has ended.
    return _Status(start_ticks, state in "ZX" and threads <= 1)
