"""tsck prove: writes and checks proofs, and says which part of a fine-tune is its base."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tensorstore_ck.errors import NoSpaceError
from tests.cli.conftest import Tsck
from tests.cli.test_sign import trust


@pytest.fixture
def key(tsck: Tsck, model: dict[str, torch.Tensor]) -> str:
    """Of a signed branch models/base; runs/ft is what was made of it."""
    made: str = tsck("keygen", "release", "--json").json["key"]
    tsck("init", "ck")
    assert tsck("put", "model.safetensors", "--ref", "models/base", "--step", "7", "--sign", "release.key").code == 0
    save_file({**model, "model.b": model["model.b"] + 1, "lora": torch.ones(3)}, "ft.safetensors")
    assert tsck("put", "ft.safetensors", "--ref", "runs/ft").code == 0
    return made


def test_prove_and_check(tsck: Tsck, key: str, tmp_path: Path) -> None:
    wrote = tsck("prove", "models/base", "model.a")
    assert wrote.code == 0
    assert "wrote model.a.proof (" in wrote.out
    again = tsck("prove", "models/base", "model.a")
    assert (again.code, "--force" in again.err) == (28, True)
    said = tsck("prove", "models/base", "model.b", "--out", "b.proof", "--json").json
    assert (said["file"], said["tensor"], said["bytes"]) == ("b.proof", "model.b", (tmp_path / "b.proof").stat().st_size)
    root = said["root"]

    untrusted = tsck("prove", "--check", "b.proof", store=None)
    assert untrusted.code == 48
    assert all(text in untrusted.err for text in (root, "step 7", "'models/base'", key, "`--root`", "`--trust`"))
    by_root = tsck("prove", "--check", "b.proof", "--root", root, "--data", "model.safetensors", store=None)
    assert by_root.code == 0
    assert by_root.out.splitlines() == [
        "model.b belongs to the snapshot",
        f"root    {root}",
        "step    7",
        "tensor  bfloat16 3, 6 B, 0 blocks",
        "data    model.safetensors is this tensor",
    ]
    file = trust(tmp_path, key)
    by_key = tsck("prove", "--check", "model.a.proof", "--trust", file, store=None)
    assert by_key.code == 0
    assert "ref     models/base" in by_key.out
    assert f"key     {key}" in by_key.out
    assert "store   " in by_key.out
    assert "data    not compared (--data FILE)" in by_key.out
    document = tsck("prove", "--check", "model.a.proof", "--trust", file, "--json", store=None).json
    assert set(document) == {"root", "step", "name", "dtype", "shape", "size_bytes", "blocks", "data_checked", "signature", "store", "log"}
    assert (document["root"], document["signature"]["key"], document["data_checked"]) == (root, key, False)


def test_a_proof_that_cannot_be_written_says_why(tsck: Tsck, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "full", path)

    monkeypatch.setattr("tensorstore_ck.cli.cmd_prove.replace_file", fail)
    refused = tsck("prove", "models/base", "model.a")
    assert refused.code == NoSpaceError.exit_code
    assert "cannot write model.a.proof" in refused.err


def test_a_file_with_other_data_is_refused(tsck: Tsck, key: str, tmp_path: Path, model: dict[str, torch.Tensor]) -> None:
    said = tsck("prove", "models/base", "model.b", "--json").json
    root = said["root"]

    def check(file: str) -> tuple[int, str]:
        done = tsck("prove", "--check", "model.b.proof", "--root", root, "--data", file, store=None)
        return done.code, done.err

    torch.save({"model": {"b": model["model.b"]}}, "true.pt")
    (tmp_path / "true.raw").write_bytes(model["model.b"].view(torch.uint8).numpy().tobytes())
    assert [check(file) for file in ("true.pt", "true.raw")] == [(0, "")] * 2
    torch.save({"model.b": model["model.b"].float()}, "dtype.pt")
    torch.save({"model.b": model["model.b"].reshape(3, 1)}, "shape.pt")
    torch.save({"b": model["model.b"]}, "name.pt")
    (tmp_path / "short.raw").write_bytes(b"123")
    (tmp_path / "empty.raw").write_bytes(b"")
    refused = {"ft.safetensors": 27, "dtype.pt": 27, "shape.pt": 27, "name.pt": 25, "short.raw": 27, "empty.raw": 27, "missing.raw": 25}
    assert {file: check(file)[0] for file in refused} == refused
    damaged = bytearray((tmp_path / "model.b.proof").read_bytes())
    damaged[200] ^= 1
    (tmp_path / "model.b.proof").write_bytes(damaged)
    assert check("true.raw")[0] == 41


def test_which_part_of_a_fine_tune_is_its_base(tsck: Tsck, key: str, tmp_path: Path) -> None:
    found = tsck("prove", "runs/ft", "--contains", "models/base")
    assert found.code == 0
    lines = [line.split() for line in found.out.splitlines()]
    assert f"signed by {key}, which no trust file names for it" in found.out
    assert ["model.a", "equal", "39.1", "KiB", "100.0", "%", "model.a"] in lines
    assert ["lora", "none", "0", "B", "0.0", "%", "-"] in lines
    document = tsck("prove", "runs/ft", "--contains", "models/base", "--trust", trust(tmp_path, key), "--json").json
    assert (document["signed_by"], document["is_trusted"]) == (key, True)
    assert [tensor["share"] for tensor in document["tensors"] if tensor["name"] == "steps"] == ["equal"]
    assert "not signed" in tsck("prove", "models/base", "--contains", "runs/ft").out


def test_what_does_not_go_together_is_a_misuse(tsck: Tsck) -> None:
    for arguments in (
        [],
        ["models/base"],
        ["models/base", "w", "--contains", "x"],
        ["models/base", "w", "--root", "0"],
        ["models/base", "--contains", "x", "--out", "y"],
        ["models/base", "--check", "x"],
        ["--check", "x", "--force"],
        ["--contains", "x"],
    ):
        refused = tsck("prove", *arguments)
        assert (refused.code, "do not go together" in refused.err) == (2, True), arguments


def test_a_tensors_name_leads_to_no_other_folder(tsck: Tsck, tmp_path: Path) -> None:
    save_file({"../../up": torch.ones(3)}, "model.safetensors")
    tsck("init", "ck")
    tsck("put", "model.safetensors", "--ref", "r")
    assert tsck("prove", "r", "../../up").code == 0
    assert [path.name for path in tmp_path.glob("*.proof")] == ["__.._up.proof"]
