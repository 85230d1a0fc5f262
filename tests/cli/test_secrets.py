"""No secret that a store is opened with reaches text, JSON, events or files, whatever command is run and whatever fails."""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, ClassVar, Final

import fsspec
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

import tensorstore_ck as tsck
from tensorstore_ck.backend import open_backend
from tensorstore_ck.backend.cold.locations import LocationOpener, check_location
from tensorstore_ck.backend.fsspec_backend import CREATE_CALLS, create_in_memory
from tensorstore_ck.backend.remote_errors import remote_errors
from tensorstore_ck.cli import main
from tensorstore_ck.errors import InvalidOptionError, InvalidUrlError, StoreError
from tensorstore_ck.events import Event
from tensorstore_ck.redaction import display_url, redacted
from tests.cli.conftest import Tsck
from tests.cli.everycommand import runs

MARK: Final = "s3cr3tMARK"
OPTIONS: Final[dict[str, Any]] = {
    "token": f"{MARK}1",
    "key": f"{MARK}2",
    "client_kwargs": {"aws_secret_access_key": f"{MARK}/3"},
    "endpoint_url": f"https://me:{MARK}4@host:9000/?sig={MARK}5",
}
URL: Final = "leaky://bucket/ck"
SECRET_URLS: Final = [
    f"s3://user:{MARK}@bucket/x",
    f"s3://user%3A{MARK}@bucket/x",
    f"s3://AKIA:ab/{MARK}@bucket/x",
    f"s3://user:a%40{MARK}@bucket/x@y",
    f"S3://user:{MARK}@[::1]:9000/x",
    f"s3://:{MARK}@bucket/x",
    f"s3://user:with space {MARK}@bucket",
    f"s3://bucket/x?X-Amz-Signature={MARK}&a=b",
    f"s3://bucket/x?%73ig={MARK}",
    f"s3://bucket/x#token={MARK}",
    f"az://container/x?sv=2024&sig={MARK}",
    f"https://{MARK}@host/x",
    f"simplecache::s3://user:{MARK}@bucket/x",
    f"zip://a::s3://user:{MARK}@bucket/x",
    f"file://user:{MARK}@host/x",
    f"nothing://user:{MARK}@host/x",
]
MISTYPED: Final = [f"s3:/user:{MARK}@bucket/x", f"s3_x://user:{MARK}@bucket/x"]
"""Local paths, but hardly meant so."""
READABLE: Final = [
    "/data/run@1?x=3&key=b",
    "run@step?",
    "user:name@host",
    "sftp://host:22/a:b@c",
    "s3://[fe80::1]:9000/x@y",
    "abfss://container@account.dfs.core.windows.net/x",
    "s3://bucket/x?storage_class=GLACIER_IR",
    "memory://x@y",
]


class LeakyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """In memory; what fails repeats all that it was given."""

    protocol = "leaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    left: ClassVar[int] = -1
    """Calls until it fails; below 0 never."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("leaky:/") if isinstance(path, str) else path)

    def _count(self, what: str) -> None:
        cls = type(self)
        cls.left -= 1
        if cls.left == 0:
            raise ConnectionError(f"{what} failed with {self.storage_options!r}") from ValueError(f"{self.storage_options!r}")

    def cat_file(self, path: str, **kwargs: Any) -> Any:
        self._count("read")
        return super().cat_file(path, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> Any:
        self._count("write")
        return super().pipe_file(path, value, **kwargs)

    def find(self, path: str, **kwargs: Any) -> Any:
        self._count("list")
        return super().find(path, **kwargs)

    def open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._count("open")
        return super().open(path, *args, **kwargs)

    def rm_file(self, path: str) -> Any:
        self._count("delete")
        return super().rm_file(path)


@pytest.fixture
def leaky(monkeypatch: pytest.MonkeyPatch) -> type[LeakyFileSystem]:
    fsspec.register_implementation("leaky", LeakyFileSystem, clobber=True)
    monkeypatch.setitem(known_implementations, "leaky", {"class": "tests.cli.test_secrets.LeakyFileSystem"})
    monkeypatch.setitem(CREATE_CALLS, "leaky", create_in_memory)
    monkeypatch.setattr(LeakyFileSystem, "store", {})
    monkeypatch.setattr(LeakyFileSystem, "left", -1)
    return LeakyFileSystem


def _told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + getattr(error, "object_id", "")


@pytest.mark.parametrize("url", SECRET_URLS)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError) as caught:
        tsck.open(url)
    assert MARK not in str(caught.value) + caught.value.object_id
    assert MARK not in display_url(url)
    for args in (["log", "-s", url], ["init", url], ["catalog", "sync", url, "/nowhere", "--db", "db"], ["copy", url, "-s", "ck"]):
        for form in ([], ["--json"]):
            result = CliRunner().invoke(main, [*args, *form], env={"TSCK_CACHE_DIR": str(tmp_path)}, catch_exceptions=False)
            assert result.exit_code
            assert MARK not in result.output


@pytest.mark.parametrize("url", MISTYPED)
def test_what_is_no_url_by_mistake_is_not_repeated_either(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError) as caught:
        tsck.open(url)
    assert MARK not in str(caught.value) + caught.value.object_id
    for form in ([], ["--json"]):
        assert MARK not in CliRunner().invoke(main, ["log", "-s", url, *form], catch_exceptions=False).output


def test_it_is_said_where_the_secret_belongs() -> None:
    with pytest.raises(InvalidUrlError, match=r"^s3://\*\*\*@bucket/x: .*storage_options \(--storage-option\)"):
        open_backend(SECRET_URLS[0])
    with pytest.raises(InvalidOptionError, match="is stored for all to see") as caught:
        check_location(SECRET_URLS[2])
    assert MARK not in str(caught.value)


@pytest.mark.parametrize("path", READABLE)
def test_what_is_no_secret_stays_readable(path: str) -> None:
    assert display_url(path) == path
    assert redacted(f"cannot read {path}: no") == f"cannot read {path}: no"


def _run(tmp_path: Path, arguments: list[str]) -> str:
    given = [f"--storage-option={name}={json.dumps(value)}" for name, value in OPTIONS.items()]
    env = {"TSCK_STORE": URL, "TSCK_CACHE_DIR": str(tmp_path / "cache"), "XDG_DATA_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    result = CliRunner().invoke(main, [*arguments, *given], env=env)
    trace = "" if result.exception is None or isinstance(result.exception, SystemExit) else _told(result.exception)
    return str(result.output) + trace


def _in_files(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and MARK.encode() in path.read_bytes()]


@pytest.mark.parametrize("fails_at", [0, 2, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 8))])
def test_no_command_shows_or_keeps_a_storage_option(
    leaky: type[LeakyFileSystem], history: Tsck, tmp_path: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["init"], *(["put", "model.safetensors", "--ref", "runs/gpt", "--step", step] for step in "12")):
        assert MARK not in _run(tmp_path, arguments)
    assert not history("init", "other").code
    seen = ""
    for arguments in runs():
        monkeypatch.setattr(leaky, "left", fails_at or -1)
        said = _run(tmp_path, arguments)
        seen += said
        assert MARK not in said, arguments
    assert _in_files(tmp_path) == []
    assert not any(MARK.encode() in file.getvalue() for file in leaky.store.values())
    assert ("failed with" in seen) == bool(fails_at)


def test_no_error_event_or_repr_of_the_library_has_one(
    leaky: type[LeakyFileSystem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []

    def use(store: tsck.Store) -> None:
        store.on_event(lambda event: said.append(repr(event)))
        store.put_snapshot({"a": 1}, ref="runs/gpt")
        store.checkout("runs/gpt")
        said.extend(map(repr, (store, store.engine, store.engine.backend, store.engine.placed, *store.log("runs/gpt"))))

    for at in range(40):
        monkeypatch.setattr(leaky, "left", at or -1)
        try:
            with tsck.open(URL, create=True, storage_options=OPTIONS, cache_dir=tmp_path / str(at)) as store:
                use(store)
        except StoreError as exc:
            said.append(_told(exc))
    assert len([text for text in said if "failed with" in text]) > 5
    assert not [text for text in said if MARK in text]
    assert MARK not in caplog.text
    assert _in_files(tmp_path) == []
    assert MARK not in repr(LocationOpener(URL, OPTIONS))
    assert MARK not in repr(Event("retried", "", "r", 1, 0, 0, {"error": f"of https://a:{MARK}@host"}))


AZURE: Final = f"DefaultEndpointsProtocol=https;AccountName=me;AccountKey={MARK}==;EndpointSuffix=core.windows.net"
QUOTED: Final = f"\\'\"{MARK}"
SAID: Final[list[tuple[dict[str, Any], str]]] = [
    ({"secret": f"a+b/{MARK}='x"}, f"a%2Bb%2F{MARK}%3D%27x"),
    ({"secret": f"a+b/{MARK}='x"}, f"a%2Bb/{MARK}%3D%27x"),
    ({"secret": QUOTED}, f"{QUOTED!r} or {json.dumps(QUOTED)}"),
    ({"sas_token": f"?sv=1&sig={MARK}"}, f"Max retries exceeded with url: /c/x?comp=list&sv=1&sig={MARK}"),
    ({"connection_string": AZURE}, f"{MARK}== is no base64"),
    ({"token": json.dumps({"type": "service_account", "private_key": MARK})}, f"no PEM: {MARK}"),
    ({"client_kwargs": {"headers": {"Authorization": f"Bearer {MARK}"}}}, f"{MARK} has expired"),
    ({"config_kwargs": {"proxies": {"https": f"http://me:{MARK}@proxy:80"}}}, f"proxy password {MARK}"),
    ({"passphrase": MARK}, f"{MARK} opens no key"),
    ({}, f"AccountKey={MARK};EndpointSuffix=x"),
    ({}, f"with url: /c/x?se=1&sig={MARK} (Caused by ...)"),
]
FOUND: Final[list[tuple[dict[str, Any], str]]] = [
    ({"token": "anon"}, "anonymous access is not allowed"),
    ({"token": "cloud"}, "no answer of storage.cloud.example"),
    ({"token": "/home/me/gcs.json"}, "no such file: /home/me/gcs.json"),
    ({"key_filename": "/home/me/.ssh/id_rsa"}, "no such file: /home/me/.ssh/id_rsa"),
    ({"signature_version": "s3v4"}, "the server does not take s3v4"),
    ({"key": "test", "secret": "main"}, "the latest attestation of domain x"),
]
"""Options that say where a secret is, or that are as short as a part of a word."""


def _failure(leaky: type[LeakyFileSystem], options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> StoreError:
    def fail(self: LeakyFileSystem, what: str) -> None:
        error = ConnectionError(said)
        error.add_note(said)
        raise error

    monkeypatch.setattr(leaky, "_count", fail)
    with pytest.raises(StoreError) as caught:
        tsck.open(URL, storage_options=options)
    return caught.value


@pytest.mark.parametrize(("options", "said"), SAID)
def test_a_secret_is_hidden_in_whatever_form_a_library_says_it(
    leaky: type[LeakyFileSystem], options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MARK not in _told(_failure(leaky, options, said, monkeypatch))


class ResponseError(Exception):
    """As aiohttp's: its text is not in its args."""

    def __init__(self) -> None:
        super().__init__(object())

    def __str__(self) -> str:
        return f"403, url='https://host/x?sig={MARK}', header {MARK}"


def test_an_error_whose_text_is_made_of_attributes_is_not_shown() -> None:
    for cause in (None, ResponseError()):
        with pytest.raises(StoreError) as caught, remote_errors("read", "x", "az://c", [MARK]):
            raise ResponseError from cause
        assert MARK not in _told(caught.value)
        assert "403" in str(caught.value)


@pytest.mark.parametrize(("options", "said"), FOUND)
def test_what_only_says_where_a_secret_is_stays_readable(
    leaky: type[LeakyFileSystem], options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said in str(_failure(leaky, options, said, monkeypatch))


def test_what_a_server_says_is_redacted_in_linear_time() -> None:
    child = """
import resource, sys
from tensorstore_ck.redaction import display_url, redacted
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
for some in sys.argv[1:]:
    text = "x://y " + some * 20_000
    for each in (text, text + "@", "@" + text):
        redacted(each), display_url(each)
"""
    subprocess.run([sys.executable, "-c", child, "a:/%2F", "http://a", "a://b:", "a:%2F", "?a=&", "sig="], check=True)


def test_the_catalog_is_its_users_alone(history: Tsck, tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        assert history("catalog", "sync", "--db", "catalog.sqlite").code == 0
    finally:
        os.umask(old)
    assert (tmp_path / "catalog.sqlite").stat().st_mode & 0o777 == 0o600
