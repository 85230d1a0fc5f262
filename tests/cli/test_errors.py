"""Every error is one line and its kind's exit code; with --json, one document."""

import shlex
import signal
from pathlib import Path

import pytest

from tensorstore_ck.errors import BY_KIND
from tensorstore_ck.store import Store
from tests import servers
from tests.cli.conftest import Tsck

BAD = [
    ("show nope", 25, "no ref or snapshot"),
    ("show runs/gpt@7", 25, ""),
    ("show runs/gpt~9", 25, ""),
    ("show deadbeef", 25, ""),
    ("show x@@", 21, ""),
    ("show abc", 25, ""),
    ("show job@", 21, ""),
    ("show job@1@2", 21, ""),
    ("show ../job", 21, ""),
    ("show ''", 21, ""),
    (f"show {'a' * 3000}", 21, ""),
    ("branch 'no good' runs/gpt", 21, ""),
    ("branch runs/gpt runs/gpt@1", 28, ""),
    ("reset nope runs/gpt", 25, ""),
    ("untag nope", 25, ""),
    ("put model.safetensors --ref 'no good'", 21, ""),
    ("put model.safetensors --ref x --step -1", 22, ""),
    ("put missing.pt --ref x", 25, ""),
    ("put model.gguf --ref x", 22, ""),
    ("get runs/gpt out.gguf", 22, ""),
    ("get runs/gpt nowhere/out.pt", 25, ""),
    ("log -s empty", 30, ""),
    ("log -s foo://bar", 23, ""),
    ("log -s http://localhost:1/ck", 23, "s3://bucket/prefix with the storage option endpoint_url"),
    ("log -s ''", 30, ""),
    ("log --storage-option a=1", 22, ""),
    ("salvage -s empty", 30, ""),
    ("init /sys/tsck", 33, ""),
    ("frobnicate", 2, ""),
    ("log --frobnicate", 2, ""),
    ("log -n 0", 2, ""),
    ("branch x", 2, ""),
    ("tag x", 2, ""),
    ("put model.safetensors", 2, ""),
    ("put model.safetensors --ref x --metric loss", 2, ""),
    ("put model.safetensors --ref x --metric loss=low", 2, ""),
    ("annotate runs/gpt =1", 2, ""),
    ("annotate runs/gpt", 2, ""),
    ("mark runs/gpt --clear --reason x", 2, ""),
    ("mark runs/gpt good", 2, ""),
    ("bisect runs/gpt", 2, ""),
    ("bisect runs/gpt --nan --metric 'loss > 5'", 2, ""),
    ("bisect runs/gpt --exec true --include x", 2, ""),
    ("forget runs/gpt~0", 11, "is the head of branch"),
    ("forget nope", 25, "no ref or snapshot"),
    ("undo nope", 25, "cannot be undone"),
    ("pin runs/gpt --expires soon", 2, "not a duration"),
    ("gc --max-delete 120%", 2, "not between"),
    ("gc --grace -1s", 2, "not a duration"),
    ("policy set runs/*", 2, "needs at least one"),
    ("policy set runs/* keep_last", 2, "is not RULE=VALUE"),
    ("policy set runs/* keep_last=1 keep_last=2", 2, "given twice"),
    ("policy set runs/* keep_last=many", 22, "a whole number"),
    ("policy set runs/* keep_lsat=1", 22, "there is no rule 'keep_lsat'"),
    ("policy set runs/* expire_after=30d", 22, "keeps something"),
    ("policy set runs/* move_after=1s", 22, "must be like"),
    ("policy remove runs/*", 25, "there is no policy"),
    ("policy test nope", 25, "there is no branch"),
    ("policy test", 2, "need a GLOB"),
    ("policy test runs/gpt --dry-run", 2, "for apply"),
    ("policy apply nope", 25, "there is no branch"),
    ("policy show runs/*", 2, "lists all policies"),
    ("policy remove runs/* keep_last=1", 2, "no other action does"),
    ("quota set", 2, ""),
    ("quota set runs/*", 2, ""),
    ("quota show runs/*", 2, ""),
    ("quota remove runs/* --warn 1TB", 2, ""),
    ("quota set x --warn lots", 2, ""),
    ("quota remove runs/*", 25, ""),
    ("probe ck --ranks 8", 2, "--ranks is for --size"),
    ("probe ck --size much", 2, "is not a size"),
    ("recode", 2, "Give branches or snapshots, or --all."),
    ("recode raw --all", 2, "Give branches or snapshots, or --all."),
    ("put model.safetensors --ref x --codec best", 2, ""),
    ("staging drop", 2, "Drop what?"),
    ("staging drop --all", 2, "Which disk?"),
    ("staging resume", 2, "Which disk?"),
    ("staging list --all", 2, "are for drop"),
    ("staging drop 01K6AZ8Q9S3M6V7J0T2N5R8W1X --yes", 25, "nothing is staged as"),
    ("staging list --staging nowhere", 22, "no folder nowhere"),
    ("watch runs/gpt --count 1 --exec 'x {oops}'", 22, ""),
]
KINDS = {2: "usage", **{error.exit_code: kind for kind, error in BY_KIND.items()}}


@pytest.mark.parametrize(("command", "code", "message"), BAD, ids=[command[:60] for command, _, _ in BAD])
def test_what_cannot_be_done(history: Tsck, command: str, code: int, message: str) -> None:
    Path("empty").mkdir()
    args = shlex.split(command)
    result = history(*args)
    assert result.code == code
    assert result.out == ""
    assert result.err.startswith("tsck: ")
    assert message in result.err
    assert result.err.count("\n") == 1
    assert code == 2 or result.err.endswith(f" (see: tsck help {KINDS[code]})\n")

    as_json = history(*args, "--json")
    assert as_json.code == code
    assert as_json.json["error"]["kind"] == KINDS[code]
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
    monkeypatch.setattr(
        Store, "log", lambda *_, **__: signal.raise_signal(signal.SIGINT)
    )  # in this thread: handled before the call returns
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
