"""A URL where a path on this host is needed, which as a path would be a folder of that name below the current one."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.common.ids import new_ulid, ulid_text
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.integrations.exporting import FollowedFolder
from tests.cli.conftest import run_tsck

URL = "s3://bucket/x.pt"
USES: dict[str, Callable[[Path], object]] = {
    "cache_dir": lambda root: tsck.open(root, cache_dir=URL),
    "state_dir": lambda root: tsck.open(root, state_dir=Path(URL)),
    "staging": lambda root: tsck.open(root, staging=URL),
    "Staging": lambda root: tsck.open(root, staging=tsck.Staging(URL)),
    "host_cache": lambda _: tsck.open("memory://local-path", create=True).follow("run", into={"w": torch.zeros(3)}, host_cache=URL),
    "follow": lambda root: FollowedFolder(tsck.open(root), "run", URL),
    "export": lambda root: tsck.export_snapshot(tsck.open(root), "run", URL, format="torch"),
    "import": lambda root: tsck.import_checkpoint(tsck.open(root), URL, ref="other"),
    "history": lambda root: tsck.import_history(tsck.open(root), "s3://bucket/*.pt", ref="other", step_from="name"),
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tsck.open(tmp_path / "store", create=True) as store:
        store.put_snapshot({"w": torch.ones(3)}, ref="run", step=1)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "store"


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_url_is_refused_as_a_path(root: Path, use: Callable[[Path], object]) -> None:
    with pytest.raises(InvalidOptionError, match="not the URL s3:"):
        use(root)
    assert os.listdir() == []


@pytest.mark.parametrize("command", ["get run s3://bucket/x.pt", "put s3://bucket/x.pt --ref other"])
def test_commands_name_the_url(root: Path, command: str) -> None:
    result = run_tsck(root.parent, *command.split(), store=str(root))
    assert result.code == 22
    assert "not the URL s3://bucket/x.pt" in result.err


def test_a_command_names_the_staging_disk_as_it_is_there(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tsck.open(root, staging="~/stage").close()
    [folder] = (tmp_path / "stage").iterdir()
    (folder / "staged").mkdir(mode=0o700)
    (folder / "staged" / ulid_text(new_ulid())).write_bytes(b"damaged")
    tsck.open(root, staging="~/stage").close()
    assert f"tsck staging --staging {tmp_path}/stage -s {root}" in caplog.text


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's, from another folder, in which nothing may be made."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    yield home
    assert not list(work.iterdir())


def test_a_tilde_is_the_home_folder(home: Path) -> None:
    with tsck.open("~/store", create=True, cache_dir="~/cache", state_dir="~/state") as store:
        store.put_snapshot({"w": torch.ones(3)}, ref="job")
        tsck.export_snapshot(store, "job", "~/job.safetensors", format="safetensors")
        tsck.import_checkpoint(store, "~/job.safetensors", ref="again")
    assert {"store", "cache", "state", "job.safetensors"} <= {path.name for path in home.iterdir()}


def test_a_tilde_in_a_command_is_the_home_folder(home: Path) -> None:
    torch.save({"w": torch.ones(3)}, home / "w.pt")
    for command in ("init", "put ~/w.pt --ref run", "get run ~/again.pt", "prove run w --out ~/w.proof"):
        result = run_tsck(home.parent, *command.split(), "--cache-dir=~/cache", "--state-dir=~/state", store="~/store")
        assert result.code == 0, result.err
    assert {"again.pt", "cache", "state", "store", "w.proof"} <= {path.name for path in home.iterdir()}
