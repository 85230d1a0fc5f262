"""Which processes are known to have ended: the real ones of this host, and what must never count as proof."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tensorstore_ck.common import processes
from tensorstore_ck.common.processes import ROOT_PID_NAMESPACE, Process, has_ended, this_process

HERE = Process("node7/0123abcd", "boot-a", ROOT_PID_NAMESPACE, 1, 1)
CONTAINER = "pid:[4026532222]"


def us() -> Process:
    found = this_process()
    if found is None:
        pytest.skip("this system does not say which process this is")
    return found


@dataclass
class Child:
    """A process that waits, and what it is."""

    popen: "subprocess.Popen[bytes]"
    process: Process


@pytest.fixture
def child() -> Child:
    script = "import sys; from tensorstore_ck.common.processes import this_process as this; "
    script += "print(*this(), sep='|', flush=True); sys.stdin.read()"
    popen = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert popen.stdout is not None
    host, boot_id, namespace, pid, start_ticks = popen.stdout.readline().decode().strip().split("|")
    return Child(popen, Process(host, boot_id, namespace, int(pid), int(start_ticks)))


@pytest.mark.race
def test_a_process_has_ended_once_it_was_killed_and_not_before(child: Child) -> None:
    here, process = us(), child.process
    assert process[:3] == here[:3]
    assert not has_ended(process, here)
    assert not has_ended(here, here)
    assert has_ended(process._replace(start_ticks=process.start_ticks - 1), here), "another process has its number now"
    os.kill(child.popen.pid, signal.SIGSTOP)
    assert not has_ended(process, here), "it may go on"
    child.popen.kill()
    os.waitid(os.P_PID, child.popen.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(process, here), "its parent has not asked for it yet"
    child.popen.communicate()
    assert has_ended(process, here)
    elsewhere: list[dict[str, Any]] = [{"host": "node8/0123abcd"}, {"host": "node7/ffff"}, {"pid_namespace": CONTAINER}]
    for far in elsewhere:
        known: dict[str, Any] = {"host": "node7/0123abcd", "pid_namespace": ROOT_PID_NAMESPACE}
        ended, observer = process._replace(**known), here._replace(**known)
        assert has_ended(ended, observer)
        assert not has_ended(ended._replace(**far), observer), "nothing is known of other hosts and containers"
        assert not has_ended(ended._replace(**far, boot_id="before"), observer)


def test_a_reboot_ends_all_processes_of_a_host_but_not_of_what_may_be_another_one() -> None:
    assert has_ended(HERE._replace(boot_id="boot-b"), HERE)
    inside, nameless = HERE._replace(pid_namespace=CONTAINER), HERE._replace(host="node7/")
    assert not has_ended(inside._replace(boot_id="boot-b"), inside), "two containers may have one name and one machine id on two hosts"
    assert not has_ended(HERE._replace(boot_id="boot-b"), inside)
    assert not has_ended(nameless._replace(boot_id="boot-b"), nameless)


def test_a_process_of_another_user_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither signals nor /proc need tell of it."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    def hide(pid: int) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(processes, "_status", hide)
    assert not has_ended(HERE._replace(pid=2), HERE)


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> str:
        raise OSError

    monkeypatch.setattr(os, "readlink", fail)
    assert this_process() is None
