"""A store with a short history, and `tsck` run in this process."""

import atexit
import contextlib
import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
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


def run_tsck(folder: Path, *args: str, store: str | None = "ck") -> Result:
    env = {"TSCK_CACHE_DIR": str(folder / "cache"), "TSCK_STORE": store, "XDG_CONFIG_HOME": str(folder / "config")}
    result = CliRunner().invoke(main, args, env=env, catch_exceptions=False)
    return Result(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def tsck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tsck:
    """Runs a command on the store ``ck`` in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state_home"))  # tests have copies of one store, whose logs go on apart
    return partial(run_tsck, tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> dict[str, torch.Tensor]:
    """What ``model.safetensors`` holds."""
    return write_model(tmp_path)


def write_model(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    noise = torch.randint(-(1 << 31), 1 << 31, (100, 100), dtype=torch.int32)  # which no codec makes smaller
    tensors = {
        "model.a": noise.view(torch.float32).nan_to_num(1, 2, 3),
        "model.b": torch.randn(3, dtype=torch.bfloat16),
        "steps": torch.arange(10),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt", "author": "me"})
    return tensors


@pytest.fixture
def history(tsck: Tsck, model: dict[str, torch.Tensor], tmp_path: Path) -> Tsck:
    """`tsck` on a store whose branch runs/gpt has steps 1 and 2, which differ in model.b alone."""
    shutil.copytree(made_history().name, tmp_path, dirs_exist_ok=True)
    return tsck


@cache
def made_history() -> TemporaryDirectory[str]:
    """Made once: each test has a copy."""
    made = TemporaryDirectory(prefix="tsck-history-")
    atexit.register(made.cleanup)
    folder = Path(made.name)
    model = write_model(folder)
    save_file({**model, "model.b": model["model.b"] + 1}, folder / "changed.safetensors")
    with contextlib.chdir(folder):
        for command in (
            "init ck",
            "put model.safetensors --ref runs/gpt --step 1 --metric val_loss=2.5 --metadata lr=3e-4",
            "put changed.safetensors --ref runs/gpt --step 2 --metric val_loss=2.25",
        ):
            assert run_tsck(folder, *command.split()).code == 0
    return made
