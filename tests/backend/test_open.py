"""From a URL to a backend."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck.backend import open_backend
from tensorstore_ck.errors import InvalidOptionError, InvalidUrlError, MissingExtraError, UnsafeBackendError


def test_paths_and_file_urls_name_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_backend("a store").put("a/b", b"x")
    spaced = f"file://{tmp_path}/a%20store"
    for url in ("a store", "./a store/", tmp_path / "a store", str(tmp_path / "a store"), spaced, f"FILE{spaced[4:]}"):
        backend = open_backend(url)
        assert backend.get("a/b", max_bytes=1) == b"x"
        assert backend.is_local
        assert backend.url == str(tmp_path / "a store")


def test_the_same_memory_url_is_the_same_store() -> None:
    open_backend("memory://test-open/one").put("a/b", b"x")
    assert open_backend("memory://test-open/one").get("a/b", max_bytes=1) == b"x"
    assert list(open_backend("memory://test-open/two").list("")) == []
    assert [found.name for found in open_backend("memory://test-open").list("")] == ["one/a/b"]


BAD_URLS = [
    "",
    "a\0b",
    "/",
    "file:///",
    "file://host/a",
    "file://a/b",
    "file:///a?b=c",
    "s3://",
    "s3:///",
    "s3:///prefix",
    "s3://bucket/a/../b",
    "memory://",
    "nosuch://a/b",
    "simplecache::s3://bucket/a",
    Path("s3://bucket/a"),
    os.path.normpath("gs://bucket/a"),
    "s3:bucket/a",
    "S3:/bucket/a",
    "file:/abs/a",
    "memory:/m",
    " s3://bucket/a",
    "my_s3://bucket/a",
    "3s://bucket/a",
    "generic://a",
    "adl://a/b",
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_malformed_urls_are_refused(url: str | Path) -> None:
    with pytest.raises(InvalidUrlError):
        open_backend(url)


def test_an_unknown_protocol_lists_the_known_ones() -> None:
    with pytest.raises(InvalidUrlError, match=r"file, .*memory, s3"):
        open_backend("s4://bucket/prefix")


def test_options_for_a_local_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError):
        open_backend(tmp_path, {"key": "x"})


def test_contradictory_options_are_refused_by_name() -> None:
    backend = open_backend("s3://bucket/prefix", {"key": "a", "username": "b"})
    with pytest.raises(InvalidOptionError, match="username"):
        backend.get("a/b", max_bytes=1)


@pytest.mark.parametrize(("url", "extra"), [("s3://bucket/a", "s3"), ("gs://bucket/a", "gcs"), ("az://bucket/a", "azure")])
def test_a_missing_library_names_the_extra(url: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(_: str) -> Any:
        raise ImportError("not installed")

    monkeypatch.setattr(importlib.import_module("fsspec.registry"), "get_filesystem_class", not_installed)
    with pytest.raises(MissingExtraError, match=rf"pip install 'tensorstore_ck\[{extra}\]'"):
        open_backend(url)


def test_urls_in_messages_have_no_credentials() -> None:
    backend = open_backend("s3://bucket/prefix/", {"key": "AKIA", "secret": "hush"})
    assert backend.url == "s3://bucket/prefix"


@pytest.mark.parametrize("prefix", ["a\\b", "./b", "a/./b", "a:b", "[x]/y", "a@b:c"])
def test_a_prefix_that_adlfs_cannot_use_is_refused(prefix: str) -> None:
    pytest.importorskip("adlfs")
    with pytest.raises(InvalidUrlError, match="another prefix"):
        open_backend(f"az://container/{prefix}")
    open_backend("az://container/d/e:f (g).h")


def test_protocols_without_a_known_atomic_create_refuse_it(tmp_path: Path) -> None:
    backend = open_backend(f"dir://{tmp_path}", {"target_protocol": "memory"})
    with pytest.raises(UnsafeBackendError):
        backend.create("log/1", b"x")


def test_local_stores_need_no_fsspec(tmp_path: Path) -> None:
    script = """
import sys
from tensorstore_ck.backend import open_backend
open_backend(sys.argv[1]).put("a/b", b"x")
assert "fsspec" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
