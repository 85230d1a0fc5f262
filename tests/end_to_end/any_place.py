"""One command on a store in some place while some fault is there: for `test_any_place`."""

import contextlib
import ctypes
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck.cli import main
from tests.backend.chaos import ChaosProxy, Fault, Plan, Request
from tests.effort import PATIENCE_SECONDS
from tests.servers import BUCKET, KEY, SECRET

FOLDERS: Final = ("folder", "folder with blanks", "copied folder")
S3: Final = ("s3", "s3 in front of which is a staging disk")
FOLDER_FAULTS: Final = ("none", "read-only", "full", "vanished", "torn", "no store.json", "lock held", "cache full", "no cache")
S3_FAULTS: Final = (
    "none",
    "hangs",
    "403",
    "503",
    "full",
    "torn",
    "no store.json",
    "lock held",
    "cache full",
    "no DeleteObjects",
    "no checksums",
    "no conditions",
    "wrong region",
    "409 once",
)
NOW: Final = "--min-age 0s --undo-window 0s --max-delete 100%"
COMMANDS: Final = {
    "log": "log runs/gpt",
    "branch": "branch",
    "show": "show runs/gpt",
    "usage": "usage",
    "diff": "diff runs/gpt~1 runs/gpt",
    "get": "get runs/gpt~1 out.pt",
    "put": "put model.pt --ref runs/new --step 1",
    "tag": "tag new runs/gpt",
    "mark": "mark runs/gpt bad",
    "pin": "pin runs/gpt --owner me",
    "policy": "policy set runs/* keep_last=2",
    "quota": "quota set runs/* --warn 1TB",
    "forget": "forget runs/old",
    "undo": "undo runs/gone",
    "reset": "reset runs/gpt runs/gpt~1",
    "gc": f"gc {NOW}",
    "fsck": "fsck",
    "fsck of data": "fsck --read-data --no-record",
    "repair": "fsck --repair",
    "copy": "copy STORE other",
    "accept-log": "accept-log",
    "staging": "staging --staging stage",
    "resume": "staging resume --staging stage",
}
FINDS: Final = (40, 45)
"""Exit codes of fsck and repair for damage and for what cannot be read: their report is the work."""


class Outcome(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str
    trouble: str
    """A traceback, if there was one."""


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a process with mounts of its own, as JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reader)
            signal.alarm(int(PATIENCE_SECONDS))
            if ctypes.CDLL(None).unshare(0x00020000) == 0:  # CLONE_NEWNS
                subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            with os.fdopen(writer, "w") as file:
                json.dump(work(), file)
            code = 0
        except BaseException:  # noqa: BLE001 - the parent sees the exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the process ended with {status}"
    return json.loads(text)


def state(step: int) -> dict[str, Any]:
    return {"w": torch.arange(20_000) + 100_000 * step, "step": step}


def fill(url: str, options: dict[str, Any], folder: Path) -> None:
    """A store with three branches, of which one was forgotten; and a file to put."""
    with tsck.open(url, create=True, storage_options=options, cache_dir=folder / "cache", state_dir=folder / "state") as store:
        for step in (1, 2, 3):
            store.put_snapshot(state(step), ref="runs/gpt", step=step)
        for number, ref in enumerate(("runs/old", "runs/gone")):
            store.put_snapshot(state(10 + number), ref=ref, step=1)
        store.forget("runs/gone")
    torch.save({"w": torch.ones(3)}, folder / "model.pt")
    tsck.open(folder / "other", create=True, cache_dir=folder / "cache").close()


def stage(url: str, options: dict[str, Any], folder: Path) -> None:
    """Steps 4 and 5 wait on a staging disk."""
    staging = tsck.Staging(folder / "stage", capacity="100MB", stagger_seconds=3600)
    store = tsck.open(url, storage_options=options, cache_dir=folder / "cache", state_dir=folder / "state", staging=staging)
    store.checkout("runs/gpt")
    for step in (4, 5):
        store.put_snapshot_async(state(step), ref="runs/gpt", step=step).staged.wait(PATIENCE_SECONDS)
    store.drain(0)
    store.close()


def load_modules(url: str, folder: Path) -> list[str]:
    """Runs every command; the modules that are loaded then, for the parent of all later processes."""
    for command in COMMANDS.values():
        run(command, url, [], folder)
    with contextlib.suppress(tsck.StoreError):
        tsck.open("s3://bucket/none", storage_options=s3_options("http://127.0.0.1:1"), cache_dir=folder / "cache")
    return [name for name in sys.modules if name.partition(".")[0] != "__main__"]


def run(command: str, url: str, options: list[str], folder: Path) -> Outcome:
    """Runs it in this process."""
    words = shlex.split(command.replace("STORE", shlex.quote(url)))
    where = [] if "STORE" in command else ["-s", url]
    host = ["--cache-dir", str(folder / "cache"), "--state-dir", str(folder / "state")]
    os.chdir(folder)
    result = CliRunner().invoke(main, [*words, *where, *options, *host])
    trouble = (
        ""
        if result.exception is None or isinstance(result.exception, SystemExit)
        else "".join(traceback.format_exception(result.exception))
    )
    return Outcome(result.exit_code, result.stdout, result.stderr, trouble)


def seen(url: str, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a store says of itself, for another host."""
    with tsck.open(url, read_only=True, storage_options=options, cache_dir=folder / "another cache", state_dir=folder / "another") as store:
        return {
            "branches": {name: found.root for name, found in store.branches().items()},
            "tags": sorted(store.tags()),
            "marks": [(each.root, each.mark) for each in store.log("runs/gpt")],
            "pins": [pin.owner for pin in store.pins()],
            "policies": sorted(store.policies()),
            "quotas": sorted(store.quotas()),
        }


# --- faults of folders --------------------------------------------------------------------------------------------------


def strike_folder(fault: str, url: str, folder: Path) -> None:
    """In the process of the command, which has mounts of its own."""
    match fault:
        case "read-only":
            subprocess.run(["mount", "--bind", url, url], check=True)
            subprocess.run(["mount", "-o", "remount,ro,bind", url], check=True)
        case "full":
            _mount_full(Path(url), keep=True)
        case "vanished":
            os.rename(url, f"{url} away")
        case "cache full":
            shutil.rmtree(folder / "cache")
            (folder / "cache").mkdir()
            _mount_full(folder / "cache", keep=False)
        case "no cache":
            shutil.rmtree(folder / "cache")
            (folder / "cache").write_text("no folder")


def _mount_full(path: Path, *, keep: bool) -> None:
    """A full disk there, with what was there before."""
    aside = path.with_name(f"{path.name} aside")
    if keep:
        shutil.copytree(path, aside)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "none", str(path)], check=True)
    if keep:
        shutil.copytree(aside, path, dirs_exist_ok=True)
    with (path / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


@contextlib.contextmanager
def held_locks(folder: Path) -> Iterator[None]:
    """Another process holds the locks of the cache."""
    files = [path.open("r+b") for path in (folder / "cache").rglob("*.lock")]
    for file in files:
        fcntl.lockf(file, fcntl.LOCK_EX)
    yield
    for file in files:
        file.close()


# --- faults of servers --------------------------------------------------------------------------------------------------

_ERROR: Final = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>Said by the proxy.</Message></Error>"


def strike_server(fault: str, proxy: ChaosProxy) -> None:
    """From now on."""
    once = [True]

    def is_create(request: Request) -> bool:
        return any(name.lower() == "if-none-match" for name in request.headers)

    def first() -> bool:
        return bool(once) and once.pop()

    plans: dict[str, tuple[Callable[[Request], bool], Fault | tuple[int, bytes]]] = {
        "hangs": (lambda _: True, Fault.HANG),
        "403": (lambda _: True, (403, b"AccessDenied")),
        "503": (lambda _: True, (503, b"SlowDown")),
        "full": (
            lambda request: request.method in ("PUT", "POST") and "delete" not in request.path,
            (400, b"XMinioAdminBucketQuotaExceeded"),
        ),
        "no DeleteObjects": (lambda request: "?delete" in request.path, (501, b"NotImplemented")),
        "no checksums": (
            lambda request: any("checksum" in name.lower() for name in request.headers) and request.method == "PUT",
            (501, b"NotImplemented"),
        ),
        "no conditions": (is_create, (400, b"NotImplemented")),
        "wrong region": (lambda _: True, (400, b"AuthorizationHeaderMalformed")),
        "409 once": (lambda request: is_create(request) and first(), (409, b"OperationAborted")),
    }
    if fault not in plans:
        return
    strikes, what = plans[fault]
    if isinstance(what, tuple):
        proxy.answer = what[0], _ERROR % what[1]
    with_plan: Plan = lambda request: (Fault.ANSWER if isinstance(what, tuple) else what) if strikes(request) else Fault.NONE  # noqa: E731
    proxy.plan = with_plan


def s3_options(endpoint: str) -> dict[str, Any]:
    """Quick ones: a fault that lasts longer than a command's patience is one that stays."""
    return {
        "key": KEY,
        "secret": SECRET,
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"read_timeout": 1, "connect_timeout": 1, "retries": {"total_max_attempts": 2}},
    }


def as_arguments(options: dict[str, Any]) -> list[str]:
    """As the command line takes them."""
    words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in options.items()]
    return [word for each in words for word in ("--storage-option", each)]


def url_in_bucket(number: int) -> str:
    return f"s3://{BUCKET}/any-{os.getpid()}-{number}"
