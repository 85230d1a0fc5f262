"""Which locations commands use: by option, and by the user's file, to which `tsck policy set` adds those that are named on this host."""

from pathlib import Path

import pytest

from tests.cli.conftest import Tsck
from tests.cli.everycommand import commands

NOW = ("--min-age", "0s", "--undo-window", "0s", "--max-delete", "100%")
READING = [
    ("get", "runs/gpt", "back.safetensors"),
    ("export", "runs/gpt", "out", "--to", "safetensors"),
    ("fsck",),
    ("fsck", "--read-data", "--repair"),
    ("usage",),
    ("tier",),
    ("gc", *NOW),
    ("copy", "ck", "other"),
    ("salvage",),
]


@pytest.fixture
def cold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is not next to the store."""
    return tmp_path_factory.mktemp("mnt") / "cold disk"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config" / "tensorstore_ck" / "places"


@pytest.fixture
def moved(history: Tsck, cold: Path, config: Path) -> Tsck:
    """All packs are at the location that was named on this host; then another user comes, who never named it."""
    named = history("policy", "set", "runs/*", f"move_after=0.001s:{cold}")
    assert str(config) in named.err
    assert config.read_text() == f"{cold}\n"
    assert history("tier").code == 0
    assert history("gc", *NOW).code == 0
    assert history("get", "runs/gpt", "first.safetensors").code == 0
    config.unlink()
    return history


def test_what_another_user_needs(moved: Tsck, cold: Path, config: Path) -> None:
    assert moved("init", "other").code == 0
    for arguments in READING:
        refused = moved(*arguments)
        assert (refused.code, refused.err.count("\n")) == (17, 1), refused
        assert f"--allow-place '{cold}/" in refused.err
        assert str(config) in refused.err
        assert moved(*arguments, "--allow-place", f"{cold}-evil").code == 17
        assert moved(*arguments, "--allow-place", str(cold)).code == 0, arguments
    config.write_text(f"# of the group\n\n{cold}/\n")
    for arguments in READING:
        force = ["--force"] if arguments[0] in ("get", "export") else []
        assert moved(*arguments, *force).code == 0, arguments


@pytest.mark.parametrize("name", ["store.json", "log/00000000000000000/00000000000000000001"])
def test_fsck_names_damage_that_it_found_before_it_came_to_the_location(moved: Tsck, cold: Path, name: str) -> None:
    path = Path("ck", name)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-3])
    for arguments in (("fsck",), ("fsck", "--repair")):
        refused = moved(*arguments, "-s", "ck")
        assert (refused.code, refused.err.count("\n")) == (17, 1), refused
        assert f"--allow-place '{cold}/" in refused.err
        assert f"also damaged: {name}: " in refused.err
    looked = moved("fsck", "--json", "-s", "ck", "--allow-place", str(cold)).json["report"]
    assert name in {finding["object"] for finding in looked["findings"] if finding["severity"] == "error"}


def test_the_log_is_read_without_it(moved: Tsck) -> None:
    for arguments in (
        ("log", "runs/gpt"),
        ("branch",),
        ("tag",),
        ("policy", "show"),
        ("pin",),
        ("forget", "runs/gpt~1"),
        ("undo", "runs/gpt"),
    ):
        assert moved(*arguments).code == 0, arguments
    assert moved("catalog", "sync", "--db", "catalog.sqlite").code == 0
    assert moved("put", "model.safetensors", "--ref", "again").code == 0
    assert moved("get", "again", "again.safetensors").code == 0


def test_repair_from_a_store_with_a_location(moved: Tsck, tmp_path: Path, cold: Path) -> None:
    assert moved("init", "other").code == 0
    assert moved("copy", "ck", "other", "--allow-place", str(cold)).code == 0
    pack = next(path for path in (tmp_path / "other" / "packs").rglob("*") if path.is_file())
    pack.write_bytes(bytes(len(pack.read_bytes())))
    repair = ("fsck", "--read-data", "--repair", "--from", "ck", "-s", "other")
    assert moved(*repair).code == 17
    assert moved(*repair, "--allow-place", str(cold)).code == 0


def test_policy_set_notes_only_what_needs_a_word(history: Tsck, tmp_path: Path, config: Path) -> None:
    assert history("policy", "set", "runs/*", f"move_after=1d:{tmp_path}/beside").err == ""
    assert not config.exists()
    config.parent.mkdir(parents=True)
    config.write_text("/mnt/first")
    rules = "move_after=1d:/mnt/first/x,2d:s3://cold/ckpt?storage_class=STANDARD_IA"
    assert history("policy", "set", "runs/*", rules).code == 0
    assert history("policy", "set", "runs/*", rules).err == ""
    assert config.read_text() == "/mnt/first\ns3://cold/ckpt\n"
    refused = history("policy", "set", "runs/*", "move_after=1d:/mnt/second,1d:/mnt/third")
    assert refused.code == 22
    assert config.read_text() == "/mnt/first\ns3://cold/ckpt\n"


def test_a_file_that_cannot_be_written_is_reported(history: Tsck, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("no folder")
    made = history("policy", "set", "runs/*", "move_after=1d:s3://cold/ckpt")
    assert made.code == 0
    assert "commands need --allow-place s3://cold/ckpt" in made.err


def test_a_line_that_names_no_location(history: Tsck, config: Path) -> None:
    config.parent.mkdir(parents=True)
    config.write_text("s3://cold\n../cold\n")
    refused = history("log", "runs/gpt")
    assert (refused.code, str(config) in refused.err) == (22, True)
    assert history("log", "runs/gpt", "--allow-place", "../cold").code == 22


def test_every_command_that_opens_a_store_takes_it(moved: Tsck, cold: Path) -> None:
    for name, command in commands().items():
        options = {parameter.name for parameter in command.params}
        if options & {"store", "source"}:
            assert "allow_place" in options, name
    before = moved("--allow-place", str(cold), "get", "runs/gpt", "before.safetensors")
    assert before.code == 0
    assert moved("policy", "remove", "runs/*").code == 0
    told = moved("policy", "show", "--allow-place", str(cold)).out
    assert f"--allow-place '{cold}'`" in told, "commands that are printed work as they are printed"
