"""Which processes are known to have ended: the real ones of this host, and what must never count as proof."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

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


def test_a_process_has_ended_once_it_was_killed_and_not_before(child: Child) -> None:
    assert child.process[:3] == us()[:3]
    assert not has_ended(child.process, us())
    os.kill(child.popen.pid, signal.SIGSTOP)
    assert not has_ended(child.process, us()), "it may go on"
    child.popen.kill()
    os.waitid(os.P_PID, child.popen.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(child.process, us()), "its parent has not asked for it yet"
    child.popen.communicate()
    assert has_ended(child.process, us())


def test_another_process_with_its_number_is_another_one(child: Child) -> None:
    assert has_ended(child.process._replace(start_ticks=child.process.start_ticks - 1), us())
    child.popen.kill()
    child.popen.communicate()


def test_this_process_goes_on() -> None:
    assert not has_ended(us(), us())


@pytest.mark.parametrize(
    "elsewhere",
    [("node8/0123abcd", ROOT_PID_NAMESPACE), ("node7/ffff", ROOT_PID_NAMESPACE), ("node7/0123abcd", CONTAINER)],
    ids=["name", "machine", "namespace"],
)
def test_nothing_is_known_of_other_hosts_and_containers(elsewhere: tuple[str, str], child: Child) -> None:
    child.popen.kill()
    child.popen.communicate()
    ended = child.process._replace(host="node7/0123abcd", pid_namespace=ROOT_PID_NAMESPACE)
    observer = us()._replace(host="node7/0123abcd", pid_namespace=ROOT_PID_NAMESPACE)
    assert has_ended(ended, observer)
    host, namespace = elsewhere
    far = ended._replace(host=host, pid_namespace=namespace)
    assert not has_ended(far, observer)
    assert not has_ended(far._replace(boot_id="before"), observer)


def test_a_reboot_ends_all_processes_of_the_host() -> None:
    assert has_ended(HERE._replace(boot_id="boot-b"), HERE)


def test_two_containers_may_have_one_name_and_one_machine_id_on_two_hosts() -> None:
    inside = HERE._replace(pid_namespace=CONTAINER)
    assert not has_ended(inside._replace(boot_id="boot-b"), inside)
    assert not has_ended(HERE._replace(boot_id="boot-b"), inside)
    nameless = HERE._replace(host="node7/")
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
