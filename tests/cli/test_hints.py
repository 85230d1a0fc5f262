"""Every command that a message prints works exactly as it is printed: in a folder with blanks and in S3, with and without ``-s``.

Each case of `hinted` brings a store into the state in which commands are printed; each of them is run in a fresh one.
"""

import contextlib
import os
import re
import shlex
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck.cli import main
from tensorstore_ck.common.printed_commands import TAKE_STORE
from tensorstore_ck.errors import StoreError
from tests.cli.hinted import CASES, ELSEWHERE, Case, Hint, Home
from tests.cli.test_guidance import PACKAGE, commands_in, texts_of
from tests.effort import in_turns
from tests.servers import BUCKET, KEY, SECRET, S3Server

PRINTED: Final = re.compile(r"`(tsck [^`]*)`")
QUICK: Final = ("no store", "no snapshots", "the head is to be forgotten", "a damaged part, in Python", "a lost pack, says fsck")


class FolderHome:
    """A store in a folder whose name has blanks."""

    options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder / "a store" / "ck")

    def names(self, prefix: str) -> list[str]:
        found = (str(path.relative_to(self.url)) for path in Path(self.url).rglob("*") if path.is_file())
        return sorted(name for name in found if name.startswith(prefix) and not name.startswith("reserve"))

    def read(self, name: str) -> bytes:
        return Path(self.url, name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        path = Path(self.url, name)
        path.unlink(missing_ok=True)
        path.write_bytes(data)

    def delete(self, name: str) -> None:
        Path(self.url, name).unlink()


class S3Home:
    """A store in a bucket; how to reach it is in the environment."""

    options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def __init__(self, folder: Path, server: S3Server) -> None:
        self.folder = folder
        self._prefix = f"{uuid.uuid4()}/a b/"
        self.url = f"s3://{BUCKET}/{self._prefix.rstrip('/')}"
        self._client = server.client()

    def names(self, prefix: str) -> list[str]:
        found = self._client.list_objects_v2(Bucket=BUCKET, Prefix=self._prefix).get("Contents", ())
        names = sorted(each["Key"].removeprefix(self._prefix) for each in found)
        return [name for name in names if name.startswith(prefix)]

    def read(self, name: str) -> bytes:
        data: bytes = self._client.get_object(Bucket=BUCKET, Key=self._prefix + name)["Body"].read()
        return data

    def write(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=self._prefix + name, Body=data)

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=self._prefix + name)


class Shell:
    """Runs commands with ``-s``; or without, where the store is the current folder, or in the environment."""

    def __init__(self, home: Home, *, names_store: bool) -> None:
        self._home = home
        self._names_store = names_store
        os.environ["XDG_CACHE_HOME"], os.environ["XDG_STATE_HOME"] = str(home.folder / "cache"), str(home.folder / "state")
        os.environ["XDG_DATA_HOME"], os.environ["XDG_CONFIG_HOME"] = str(home.folder / "data"), str(home.folder / "config")

    def type(self, line: str) -> tuple[int, str]:
        """What a user does at a shell: the exit code, and what is printed."""
        _, *words = shlex.split(line)
        variables = {} if self._names_store else {"TSCK_STORE": self._home.url}
        result = CliRunner().invoke(main, words, env=variables, catch_exceptions=False)
        return result.exit_code, result.stdout + result.stderr

    def try_it(self, tried: str | Callable[[tsck.Store], object]) -> tuple[int, str]:
        """What prints the commands."""
        if isinstance(tried, str):
            line = f"tsck {tried}".replace("STORE", shlex.quote(self._home.url))
            takes_store = "STORE" not in tried and tried.split()[0] in TAKE_STORE
            return self.type(f"{line} -s {shlex.quote(self._home.url)}" if takes_store and self._names_store else line)
        try:
            with tsck.open(self._home.url) as store:
                tried(store)
        except StoreError as exc:
            return exc.exit_code, str(exc)
        return 0, ""


def beginning_of(case: Case, printed: str) -> str:
    beginnings = [beginning for beginning in case.hints if printed.removeprefix("tsck ").startswith(beginning)]
    assert beginnings, f"no case says what this does: {printed}"
    return max(beginnings, key=len)


def filled(printed: str, hint: Hint, url: str) -> str:
    for placeholder, value in hint.filled.items():
        assert placeholder in printed, f"there is no {placeholder} in {printed}"
        printed = printed.replace(placeholder, shlex.quote(url if placeholder == "STORE" else value))
    return printed


def follow_each(case: Case, make_home: Callable[[str], Home], *, names_store: bool) -> None:
    """Tries it, and runs each command that is printed, in a fresh store each."""
    number, count = 0, 1
    seen: set[str] = set()
    while number < count:
        home = make_home(str(number))
        home.folder.mkdir(parents=True)
        with contextlib.chdir(home.folder):
            shell = Shell(home, names_store=names_store)
            case.make(home)
            code, text = shell.try_it(case.tried)
            assert code == case.code, text
            printed = list(dict.fromkeys(PRINTED.findall(text)))
            count = len(printed)
            assert printed, text
            beginning = beginning_of(case, printed[number])
            seen.add(beginning)
            hint = case.hints[beginning]
            follower = shell if isinstance(case.tried, str) else Shell(home, names_store=True)
            for earlier in printed:
                if hint.after and earlier.startswith(f"tsck {hint.after}"):
                    assert follower.type(filled(earlier, hint, home.url))[0] == 0
            line = filled(printed[number], hint, home.url)
            done, said = follower.type(line)
            assert done == hint.code, (line, said)
            if hint.cures:
                after, said = shell.try_it(case.tried)
                assert (after, printed[number] in PRINTED.findall(said)) == (0, False), (line, said)
        number += 1
    assert seen == {*case.hints}, "a command that is no longer printed"


def params() -> Iterator[Any]:
    for name in CASES:
        for names_store in (True, False):
            is_quick = name in QUICK and names_store
            yield pytest.param(
                name, names_store, id=f"{name}-{'-s' if names_store else 'no -s'}", marks=() if is_quick else pytest.mark.slow
            )


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TSCK_") or name == "PYTHONWARNINGS"]:
        monkeypatch.delenv(name)
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, "")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("name", "names_store"), [*params()])
def test_in_a_folder(tmp_path: Path, name: str, names_store: bool) -> None:
    follow_each(CASES[name], lambda number: FolderHome(tmp_path / f"n {number}"), names_store=names_store)


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "names_store"), [([*CASES][case], names_store) for case, names_store in in_turns(range(len(CASES)), (True, False))]
)
def test_in_s3(moto_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, names_store: bool) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    if not CASES[name].only_folders:
        follow_each(CASES[name], lambda number: S3Home(tmp_path / f"n {number}", moto_server), names_store=names_store)


def test_each_command_in_a_message_has_a_case() -> None:
    """By its name and options."""
    cases = {form_of(f"{beginning} X") for case in CASES.values() for beginning in case.hints}
    found = commands_in([text for path in PACKAGE.rglob("*.py") if path.parts[-2] != "cli" for text in texts_of(path)])
    missing = {form_of(command) for command in found} - cases
    assert missing == {form_of(command) for command in ELSEWHERE}


def form_of(command: str) -> tuple[str, frozenset[str]]:
    name, *words = command.split()
    return name, frozenset(word for word in words if word.startswith("--") and word not in ("--from", "--db"))
