"""A store.json that is damaged, gone or another store's: fsck reports it, checks the rest, repairs it from a copy that the log confirms."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck.cli import main
from tensorstore_ck.format.store_config import StoreConfig, decode_config, new_config

Fsck = Callable[..., dict[str, Any]]

SOUND: dict[str, Callable[[StoreConfig], bytes | None]] = {
    "missing": lambda config: None,
    "empty": lambda config: b"",
    "garbage": lambda config: b"\x00\xff" * 4000,
    "too long": lambda config: b"[" * 100_000,
    "another store's": lambda config: new_config(exclusive_create=True).encode(),
    "of another version": lambda config: replace(config, format=2).encode(),
    "with unknown features": lambda config: replace(config, features=("x",)).encode(),
    "cut in its uuid": lambda config: config.encode()[:-9],
}
CUT: dict[str, Callable[[StoreConfig], bytes | None]] = {
    "cut": lambda config: config.encode()[:-3],
    "flipped": lambda config: config.encode().replace(b"true", b"trve"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for name, ref in (("store", "runs/a"), ("stranger", "runs/b")):
        with tsck.open(folder / name, create=True, no_sync=True, cache_dir=folder / "cache") as store:
            store.put_snapshot({"t": torch.randn(4000)}, ref=ref, step=1)
            store.put_snapshot({"t": torch.randn(4000)}, ref=ref, step=2)
    return folder


@pytest.fixture
def fsck(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fsck:
    """Checks ``store``, of which ``copy`` is a copy, next to a ``stranger``."""
    for name, source in (("store", "store"), ("copy", "store"), ("stranger", "stranger")):
        shutil.copytree(made / source, tmp_path / name)
    monkeypatch.chdir(tmp_path)

    def run(*args: str, code: int) -> dict[str, Any]:
        result = CliRunner().invoke(main, ["fsck", "-s", "store", "--json", *args], env={"TSCK_CACHE_DIR": "cache"}, catch_exceptions=False)
        assert result.exit_code == code, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return run


def files() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path("store").rglob("*") if path.is_file()}


def damage(how: Callable[[StoreConfig], bytes | None]) -> bytes:
    """Damages store.json; what it was."""
    path = Path("store/store.json")
    before = path.read_bytes()
    data = how(decode_config(before, "here"))
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    return before


def errors(document: dict[str, Any]) -> list[tuple[str, str]]:
    report = document["report"]
    assert report["log_entries"] >= 2, "and what checks noted"
    assert report["snapshots"] == 2
    return [(finding["object"], finding["message"]) for finding in report["findings"] if finding["severity"] == "error"]


@pytest.mark.parametrize("how", [*SOUND, *CUT])
def test_fsck_names_it_and_checks_the_rest_and_repairs_it_from_a_copy_or_what_the_log_confirms(fsck: Fsck, how: str) -> None:
    sound = damage({**SOUND, **CUT}[how])
    before = files()
    ((name, message),) = errors(fsck(code=40))
    assert name == "store.json"
    options = "" if how in CUT else " --from OTHER_STORE"
    assert f"`tsck fsck --repair{options} -s {Path('store').absolute()}`" in message
    pack = next(path for path in Path("store/packs").rglob("*") if path.is_file())
    data = pack.read_bytes()
    pack.unlink()
    assert {name for name, _ in errors(fsck(code=40))} == {"store.json", str(pack.relative_to("store"))}
    pack.write_bytes(data)
    if how in SOUND:
        assert fsck("--repair", code=40)["ok"] is False
        fsck("--repair", "--from", "stranger", code=40)
    assert files() == before
    assert errors(fsck("--repair", *(() if how in CUT else ("--from", "copy")), code=0)) == []
    assert Path("store/store.json").read_bytes() == sound
    assert errors(fsck(code=0)) == []


def test_a_forged_first_entry_is_no_reason_to_change_it(fsck: Fsck) -> None:
    for first in Path("store/log").rglob("*1"):
        first.chmod(0o600)
        shutil.copy(next(Path("stranger/log").rglob(first.name)), first)
    (name, _), *_ = errors(fsck(code=40))
    assert "log/" in name
    before = Path("store/store.json").read_bytes()
    errors(fsck("--repair", "--from", "copy", code=0))
    assert Path("store/store.json").read_bytes() == before


def test_a_log_that_is_not_there_is_no_empty_store(fsck: Fsck) -> None:
    damage(lambda config: replace(config, log="log-01").encode())
    before = files()
    for args in ((), ("--repair",), ("--repair", "--from", "copy")):
        (finding,) = [found for found in fsck(*args, code=40)["report"]["findings"] if found["severity"] == "error"]
        assert finding["object"] == "store.json"
        assert "names the log log-01, which is not there; found: log" in finding["message"]
        assert f"`tsck salvage -s {Path('store').absolute()}`" in finding["message"]
    assert {name: data for name, data in files().items() if name in before} == before


def test_a_handle_does_not_undo_an_upgrade(fsck: Fsck) -> None:
    with tsck.open("store", cache_dir="cache") as store:
        damage(SOUND["of another version"])
        upgraded = files()
        assert not store.repair().ok
    assert files() == upgraded
