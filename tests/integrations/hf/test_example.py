"""The example script: a second run continues the first, and ends as one run does."""

import re
from pathlib import Path

import pytest

from examples.transformers_trainer import main


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = []
    for folder, runs in (("cut", ("20", "60")), ("whole", ("60",))):
        for steps in runs:
            main(["--folder", str(tmp_path / folder), "--steps", steps])
        found.append(re.findall(r"runs/fox@(\d+)  loss ([\d.]+)", capsys.readouterr().out))
    cut, whole = found
    assert [step for step, _ in whole] == ["60", "40"]
    assert cut[-2:] == whole
