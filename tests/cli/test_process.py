"""`tsck` as a process: exit codes, streams, and what it does not load."""

import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck
from tests.cli.conftest import Tsck
from tests.cli.everycommand import RUNS

ROOT = str(Path(tensorstore_ck.__file__).parents[1])
RUN = """
import json, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Blocker())
from tensorstore_ck.cli import main
for command in sys.argv[1:]:
    try:
        main(json.loads(command) if command[0] == "[" else command.split())
    except SystemExit as ended:
        if ended.code:
            print(command, "ended with", ended.code, file=sys.stderr)
    if loaded := {"torch", "fsspec", "s3fs", "aiohttp", "botocore"} & set(sys.modules):
        sys.exit(f"{command} loaded {loaded}")
"""
"""`tsck` where torch cannot be loaded: one command after another, and what was loaded that is slow to load."""


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ROOT, "TSCK_CACHE_DIR": str(folder / "cache"), "TSCK_STORE": str(folder / "ck")}


def _python(folder: Path, *args: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, *args], env=_environment(folder), cwd=folder, text=True, timeout=120, check=False, **options)


def _tsck(folder: Path, *args: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return _python(folder, "-m", "tensorstore_ck.cli", *args, **options)


def test_only_commands_on_tensors_load_torch(history: Tsck, tmp_path: Path) -> None:
    left_out = {"put", "get", "import", "export", "follow", "verify-resume", "init", "staging", "verify"}  # the last three would fail here
    each = [
        json.dumps(run) for name, several in RUNS.items() if name not in left_out for run in several if not {"--stats", "--check"} & {*run}
    ]
    more = ["log runs/gpt --json", "log runs/gpt --plot val_loss", "gc --dry-run", "salvage", "--help", "put --help"]
    done = _python(tmp_path, "-W", "error", "-c", RUN, "init copied", *each, *more)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_printed_without_loading_the_store(tmp_path: Path) -> None:
    code = "import sys\nfrom tensorstore_ck.cli import main\ntry: main(['--version'])\nfinally: print(*sys.modules)"
    version, loaded = _python(tmp_path, "-c", code).stdout.splitlines()
    assert version == f"tsck {tensorstore_ck.__version__}"
    own = [name for name in loaded.split() if name.startswith("tensorstore_ck")]
    assert len(own) < 20
    assert not {"torch", "numpy", "fsspec", "rich", "sqlalchemy", "psycopg"} & set(loaded.split())


def test_exit_codes_and_streams_without_bars_and_colours(history: Tsck, tmp_path: Path) -> None:
    done = _tsck(tmp_path, "fsck", "--read-data")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    done = _tsck(tmp_path, "show", "nope")
    assert (done.returncode, done.stdout) == (25, "")
    assert done.stderr.startswith("tsck: there is no ref or snapshot 'nope'")


def test_a_closed_pipe_is_quiet(history: Tsck, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = _tsck(tmp_path, "log", stdout=writer)
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("stdout", "code", "said"),
    [("/dev/full", 34, "the command has done its work, but its output is lost: No space left on device"), (None, 0, "")],
)
def test_what_becomes_of_the_output_stops_no_work(history: Tsck, tmp_path: Path, stdout: str | None, code: int, said: str) -> None:
    target = "1>&-" if stdout is None else f">{stdout}"
    line = f"exec {shlex.quote(sys.executable)} -m tensorstore_ck.cli tag after runs/gpt {target}"
    done = subprocess.run(["sh", "-c", line], env=_environment(tmp_path), cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, said in done.stderr, done.stderr.count("\n")) == (code, True, 1 if said else 0), done.stderr
    assert "after" in history("tag").out


def test_a_stream_that_cannot_show_a_character_shows_its_code(history: Tsck, tmp_path: Path) -> None:
    history("mark", "runs/gpt@1", "bad", "--reason", "日本 é")
    done = subprocess.run(
        [sys.executable, "-m", "tensorstore_ck.cli", "log"],
        env=_environment(tmp_path) | {"PYTHONIOENCODING": "latin-1"},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert r"\u65e5\u672c é".encode("latin-1") in done.stdout


@pytest.mark.parametrize("variable", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colours_where_none_are_wanted(history: Tsck, tmp_path: Path, variable: dict[str, str]) -> None:
    terminal, child = pty.openpty()
    env = {**_environment(tmp_path), "TERM": "xterm", "TSCK_PAGER": "cat", **variable}
    done = subprocess.run([sys.executable, "-m", "tensorstore_ck.cli", "branch"], env=env, stdout=child, check=False)
    os.close(child)
    shown = os.read(terminal, 10_000)
    os.close(terminal)
    assert (done.returncode, b"\x1b" in shown, b"runs/gpt" in shown) == (0, False, True)


def test_a_store_as_an_argument_gets_a_hint_that_works(history: Tsck) -> None:
    done = history("fsck", "ck", store=None)
    assert (done.code, "did you mean `tsck fsck -s ck`?" in done.err) == (2, True)
    assert history("fsck", "-s", "ck", store=None).code == 0


def test_bars_on_a_terminal(history: Tsck, tmp_path: Path) -> None:
    terminal, child = pty.openpty()
    try:
        done = _tsck(tmp_path, "fsck", "--read-data", "--json", stderr=child)
        os.close(child)
        shown = _read_all(terminal)
    finally:
        os.close(terminal)
    assert done.returncode == 0
    assert b"100%" in shown
    json.loads(done.stdout)


def _read_all(descriptor: int) -> bytes:
    data = b""
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # what a terminal says whose other end is closed
            return data
        if not piece:
            return data
        data += piece


def test_arguments_that_are_no_utf8_and_a_narrow_terminal(history: Tsck, tmp_path: Path) -> None:
    """Under a locale that has ASCII alone."""
    env = {**_environment(tmp_path), "LC_ALL": "POSIX", "COLUMNS": "40"}

    def run(*args: bytes) -> tuple[int, bytes, bytes]:
        done = subprocess.run([sys.executable, "-m", "tensorstore_ck.cli", *args], env=env, cwd=tmp_path, capture_output=True, check=False)
        return done.returncode, done.stdout, done.stderr

    code, _, said = run(b"log", b"r\xff\xc3\xa9")
    assert (code, said.count(b"\n"), b"cannot be the name of a branch" in said) == (21, 1, True)
    os.rename(tmp_path / "ck", os.fsencode(tmp_path) + b"/a \xff")
    code, out, said = run(b"branch", b"-s", b"a \xff")
    assert (code, b"runs/gpt" in out, said) == (0, True, b"")
