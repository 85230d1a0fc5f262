"""`tsck import`: what it prints, what it saves, and how it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Tsck, tsck

__all__ = ["tsck"]


class Own:
    """Somebody's own class."""


@pytest.fixture
def run(tsck: Tsck) -> Tsck:
    """`tsck` on a store."""
    assert tsck("init", "ck").code == 0
    return tsck


def test_import(run: Tsck) -> None:
    save_file({"a": torch.ones(1000), "b": torch.zeros(2)}, "model.safetensors", {"format": "pt"})
    done = run("import", "model.safetensors", "--ref", "models/base", "--step", "7", "--metric", "loss=2.5", "--metadata", "lr=3e-4")
    assert done.code == 0
    first, last = done.out.splitlines()
    assert first == "found a safetensors file: 2 tensors (3.9 KiB), 0 other values"
    assert last.startswith("models/base is now at ")
    assert ", step 7" in last
    shown: dict[str, Any] = json.loads(run("show", "models/base", "--json").out)
    assert shown["metadata"] == {"format": "pt", "lr": 3e-4}
    again = run("import", "model.safetensors", "--ref", "models/base", "--json")  # on top of what is there
    document = json.loads(again.out)
    assert document["snapshot"]["parent"] is not None
    assert document["contents"]["format"] == "safetensors file"


def test_a_dry_run_writes_nothing(run: Tsck) -> None:
    torch.save({"a": torch.ones(5), "b": 1, "c": Path("x"), "d": Path("y"), "own": Own()}, "a.pt")
    done = run("import", "a.pt", "--ref", "new", "--dry-run", "--exclude", "own")
    assert done.out.splitlines() == [
        "found a torch file: 1 tensor (20 B), 3 other values",
        "converted: pathlib.PosixPath, read as text (2 times)",
        "left out: own",
        "nothing was written (--dry-run)",
    ]
    assert run("log", "new").code == 25


def test_errors_are_one_line(run: Tsck) -> None:
    torch.save({"own": Own()}, "own.pt")
    Path("bad.pt").write_bytes(Path("own.pt").read_bytes()[:-30])
    Path("zero.pt").touch()
    for path, code in {"own.pt": 24, "bad.pt": 41, "zero.pt": 41, "nowhere.pt": 25, "ck": 25}.items():
        for options in ((), ("--dry-run",)):
            done = run("import", path, "--ref", "new", *options)
            assert done.code == code, done
            assert done.err.startswith("tsck: ")
            assert len(done.err.splitlines()) == 1
            assert not done.out
    assert run("log", "new").code == 25


def test_a_part_of_a_checkpoint(run: Tsck) -> None:
    save_file({"a": torch.ones(5)}, "model-00001-of-00002.safetensors")
    refused = run("import", "model-00001-of-00002.safetensors", "--ref", "part")
    assert (refused.code, "lacks model-00002-of-00002.safetensors: get all files" in refused.err) == (41, True)
    done = run("import", "model-00001-of-00002.safetensors", "--ref", "part", "--partial")
    assert "missing: model-00002-of-00002.safetensors" in done.out.splitlines()
    assert json.loads(run("show", "part", "--json").out)["metadata"] == {"partial": "lacks model-00002-of-00002.safetensors"}
