"""A store with a short history, and `tsck` run in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from tensorstore_ck.cli import main


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Tsck = Callable[..., Result]


@pytest.fixture
def tsck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tsck:
    """Runs a command on the store ``ck`` in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)

    def run(*args: str, store: str | None = "ck") -> Result:
        env = {"TSCK_CACHE_DIR": str(tmp_path / "cache"), "TSCK_STORE": store, "XDG_CONFIG_HOME": str(tmp_path / "config")}
        result = CliRunner().invoke(main, args, env=env, catch_exceptions=False)
        return Result(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def model(tmp_path: Path) -> dict[str, torch.Tensor]:
    """What ``model.safetensors`` holds."""
    torch.manual_seed(0)
    noise = torch.randint(-(1 << 31), 1 << 31, (100, 100), dtype=torch.int32)  # which no codec makes smaller
    tensors = {
        "model.a": noise.view(torch.float32).nan_to_num(1, 2, 3),
        "model.b": torch.randn(3, dtype=torch.bfloat16),
        "steps": torch.arange(10),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt", "author": "me"})
    return tensors


@pytest.fixture
def history(tsck: Tsck, model: dict[str, torch.Tensor], tmp_path: Path) -> Tsck:
    """`tsck` on a store whose branch runs/gpt has steps 1 and 2, which differ in model.b alone."""
    assert tsck("init", "ck").code == 0
    assert (
        tsck("put", "model.safetensors", "--ref", "runs/gpt", "--step", "1", "--metric", "val_loss=2.5", "--metadata", "lr=3e-4").code == 0
    )
    save_file({**model, "model.b": model["model.b"] + 1}, tmp_path / "changed.safetensors")
    assert tsck("put", "changed.safetensors", "--ref", "runs/gpt", "--step", "2", "--metric", "val_loss=2.25").code == 0
    return tsck
