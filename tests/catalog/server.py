"""A real PostgreSQL for the tests, in a folder of its own, on a Unix socket; gone at the end."""

import contextlib
import getpass
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SETTINGS = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "listen_addresses=", "max_connections=50", "shared_buffers=64MB")


def program(name: str) -> Path | None:
    """Debian keeps them out of PATH."""
    found = shutil.which(name)
    places = [Path(found)] if found else sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return places[-1] if places else None


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URL of an empty database. The server refuses to run as root, so root has it run by somebody else."""
    user = _somebody() if os.getuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="tsck-pg-"))
    try:
        if user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)
        data = folder / "data"
        _run(user, "initdb", "-D", data, "-U", "tsck", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        options = " ".join(f"-c {setting}" for setting in (*SETTINGS, f"unix_socket_directories={folder}"))
        _run(user, "pg_ctl", "-D", data, "-w", "-t", "60", "-l", folder / "log", "-o", options, "start")
        try:
            yield f"postgresql://tsck@/postgres?host={folder}"
        finally:
            _run(user, "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _somebody() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError(f"{getpass.getuser()} cannot run PostgreSQL, and there is no user postgres or nobody")


def _run(user: pwd.struct_passwd | None, name: str, *arguments: object) -> None:
    command = [str(program(name)), *map(str, arguments)]
    who = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    quiet = subprocess.DEVNULL  # the server inherits them: a pipe would never end
    done = subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, cwd="/", timeout=120, check=False, **who)  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}")
