"""Every error is one line and its kind's exit code; with --json, one document."""

from pathlib import Path

import pytest

from tensorstore_ck.store import Store
from tests import servers
from tests.cli.conftest import Tsck

BAD = [
    (("show", "nope"), 25, "not_found"),
    (("show", "runs/gpt@7"), 25, "not_found"),
    (("show", "runs/gpt~9"), 25, "not_found"),
    (("show", "deadbeef"), 25, "not_found"),
    (("show", "x@@"), 21, "invalid_name"),
    (("branch", "no good", "runs/gpt"), 21, "invalid_name"),
    (("branch", "runs/gpt", "runs/gpt@1"), 28, "already_exists"),
    (("reset", "nope", "runs/gpt"), 25, "not_found"),
    (("untag", "nope"), 25, "not_found"),
    (("put", "model.safetensors", "--ref", "no good"), 21, "invalid_name"),
    (("put", "model.safetensors", "--ref", "x", "--step", "-1"), 22, "invalid_option"),
    (("put", "missing.pt", "--ref", "x"), 25, "not_found"),
    (("log", "-s", "empty"), 30, "not_a_store"),
    (("log", "-s", "foo://bar"), 23, "invalid_url"),
    (("log", "-s", ""), 30, "not_a_store"),
    (("log", "--storage-option", "a=1"), 22, "invalid_option"),
    (("salvage", "-s", "empty"), 30, "not_a_store"),
    (("init", "/sys/tsck"), 33, "permission_denied"),
    (("frobnicate",), 2, "usage"),
    (("log", "--frobnicate"), 2, "usage"),
    (("log", "-n", "0"), 2, "usage"),
    (("branch", "x"), 2, "usage"),
    (("tag", "x"), 2, "usage"),
    (("put", "model.safetensors"), 2, "usage"),
    (("put", "model.safetensors", "--ref", "x", "--metric", "loss"), 2, "usage"),
    (("put", "model.safetensors", "--ref", "x", "--metric", "loss=low"), 2, "usage"),
    (("annotate", "runs/gpt", "=1"), 2, "usage"),
    (("annotate", "runs/gpt"), 2, "usage"),
    (("mark", "runs/gpt", "--clear", "--reason", "x"), 2, "usage"),
]


@pytest.mark.parametrize(("args", "code", "kind"), BAD, ids=[" ".join(args) for args, _, _ in BAD])
def test_bad_input(history: Tsck, args: tuple[str, ...], code: int, kind: str) -> None:
    Path("empty").mkdir()
    result = history(*args)
    assert result.code == code
    assert result.out == ""
    assert result.err.startswith("tsck: ")
    assert result.err.count("\n") == 1
    assert kind == "usage" or result.err.endswith(f"/docs/troubleshooting.md#{kind})\n")

    as_json = history(*args, "--json")
    assert as_json.code == code
    assert as_json.json["error"]["kind"] == kind
    assert set(as_json.json["error"]) == {"kind", "message", "object"}
    assert as_json.err == ""
    assert len(history("log", "--json").json) == 2


@pytest.mark.parametrize(("name", "code"), [("store.json", 41), ("log", 43), ("snapshots", 41), ("parts", 41)])
def test_corrupt_objects(history: Tsck, tmp_path: Path, name: str, code: int) -> None:
    found = tmp_path / "ck" / name
    files = [found] if found.is_file() else [path for path in found.rglob("*") if path.is_file()]
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.chmod(0o600)
        path.write_bytes(data)
    result = history("show", "runs/gpt", "--cache-dir", "fresh")
    assert result.code == code
    assert result.err.count("\n") == 1


def test_control_characters_from_a_store_never_reach_the_terminal(history: Tsck) -> None:
    assert history("mark", "runs/gpt", "--reason", "\x1b[2J\nforged line\x9b31m").code == 0
    for args in (("log", "runs/gpt"), ("show", "runs/gpt"), ("get", "runs/gpt", "x.pt")):
        result = history(*args)
        assert not any(char in result.out + result.err for char in "\x1b\x9b")
        assert "\nforged" not in result.out + result.err


def test_an_interrupt_ends_with_130(history: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "log", interrupt)
    assert history("log").code == 130
    assert history("log", "--json").json["error"]["kind"] == "interrupted"


@pytest.mark.s3
def test_a_backend_that_ignores_conditions(tsck: Tsck, rclone_server: servers.S3Server) -> None:
    options = [f"--storage-option=key={servers.KEY}", f"--storage-option=secret={servers.SECRET}"]
    options += [f"--storage-option=endpoint_url={rclone_server.endpoint}", '--storage-option=client_kwargs={"region_name": "us-east-1"}']
    url = f"s3://{servers.BUCKET}/cli"
    refused = tsck("init", url, *options)
    assert refused.code == 32
    assert "tsck probe" in refused.err
    probed = tsck("probe", url, *options)
    assert probed.code == 32
    assert "creates exclusively     NO" in probed.out
    assert tsck("init", url, *options, "--single-writer-unsafe").code == 0
    assert tsck("branch", "--json", "-s", url, *options).json == {}
