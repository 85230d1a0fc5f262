"""`tsck export`: what it prints, with and without --json."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.cli.conftest import Tsck, history, model, tsck

__all__ = ["history", "model", "tsck"]


def test_export(history: Tsck, model: dict[str, torch.Tensor]) -> None:
    result = history("export", "runs/gpt@1", "--to", "safetensors", "out", "--include", "model.*")
    assert result.code == 0, result.err
    assert result.out.startswith("wrote out from ")
    assert "1 file, 2 tensors" in result.out
    assert torch.equal(load_file("out/model.safetensors")["model.a"], model["model.a"])
    assert history("export", "runs/gpt", "--to", "torch", "out.pt").code == 0
    assert torch.equal(torch.load("out.pt")["model.b"], model["model.b"] + 1)
    assert history("export", "runs/gpt", "--to", "dcp", "checkpoint/").code == 0
    assert sorted(path.name for path in Path("checkpoint").iterdir()) == [".metadata", "__0_0.distcp"]


def test_json(history: Tsck) -> None:
    document = history("export", "runs/gpt", "--to", "safetensors", "out", "--max-file-size", "1kB", "--json").json
    assert document["format"] == "safetensors"
    assert document["tensors"] == 3
    assert document["files"][0]["name"] == "model-00001-of-00003.safetensors"
    assert document["bytes"] == sum(path.stat().st_size for path in Path("out").iterdir())
    assert document["snapshot"]["step"] == 2
    assert document["left_out"] == {}


def test_what_is_left_out_is_reported(tsck: Tsck) -> None:
    torch.save({"a": torch.ones(3), "b": list(range(3)), "c": {str(number): "x" for number in range(9)}, "d": {}}, "in.pt")
    assert tsck("init", "ck").code == 0
    assert tsck("put", "in.pt", "--ref", "x").code == 0
    out = tsck("export", "x", "--to", "safetensors", "out").out
    assert "left out (not a tensor; in values.json): b, c.0, c.1, c.2, c.3 and 5 more" in out
    assert "left out (an empty dict, which DCP drops): d" in tsck("export", "x", "--to", "dcp", "dcp").out


def test_errors_are_one_line(history: Tsck) -> None:
    Path("there").mkdir()
    for args, code in (
        (("runs/gpt", "--to", "dcp", "there"), 28),
        (("runs/gpt", "--to", "torch", "no/where"), 25),
        (("nope", "--to", "torch", "out"), 25),
        (("runs/gpt", "--to", "torch", "out", "--include", "nope"), 27),
        (("runs/gpt", "--to", "torch", "/sys/out"), 33),
        (("runs/gpt", "--to", "onnx", "out"), 2),
        (("runs/gpt", "--to", "dcp", "out", "--max-file-size", "0"), 2),
    ):
        result = history("export", *args)
        assert result.code == code, (args, result.err)
        assert result.err.startswith("tsck: ")
        assert result.err.count("\n") == 1
        assert result.out == ""
    assert history("mark", "runs/gpt", "--reason", "diverged").code == 0
    assert history("export", "runs/gpt", "--to", "dcp", "out").code == 36
    assert history("export", "runs/gpt", "--to", "dcp", "out", "--allow-marked").code == 0
