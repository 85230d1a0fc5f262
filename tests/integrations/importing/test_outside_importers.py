"""Importers of other packages: a real one, and those that misbehave."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.integrations.importing import ForeignCheckpoint, outside_importers
from tests.effort import PATIENCE_SECONDS

PACKAGE = Path(__file__).resolve().parents[3] / "examples" / "npz_importer"


@pytest.fixture
def importers(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Has these functions as if packages with them were installed."""

    class Point(EntryPoint):
        def load(self) -> Any:
            return self.__dict__["function"]

    def put(functions: dict[str, Any]) -> None:
        points = [Point(name, f"package:{name}", outside_importers.GROUP) for name in functions]
        for point in points:
            point.__dict__["function"] = functions[point.name]
        monkeypatch.setattr(outside_importers, "entry_points", lambda **_: points)

    return put


@pytest.mark.slow
def test_a_package_with_an_importer_is_used_once_it_is_installed(tmp_path: Path) -> None:
    """In a process of its own, as a user has it: the command finds it, by content, and leaves other formats alone."""
    source, target = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for each in PACKAGE.glob("*.*"):
        (source / each.name).write_bytes(each.read_bytes())
    options: list[str | Path] = ["--quiet", "--no-deps", "--no-build-isolation", "--target", target]
    pip: list[str | Path] = [sys.executable, "-m", "pip", "install", *options, source]
    subprocess.run(pip, check=True, timeout=PATIENCE_SECONDS)
    np.savez(tmp_path / "model_000400.npz", weight=np.arange(6.0), bias=np.ones(2, np.float32))
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    script = f"""
import sys; sys.path.append({str(target)!r})
import tensorstore_ck as tsck
with tsck.open("ck", create=True) as store:
    print(tsck.import_checkpoint(store, "model_000400.npz", ref="runs/npz").contents.format)
    print(tsck.import_checkpoint(store, "model.pt", ref="runs/pt").contents.format)
    print(store.resolve("runs/npz@400").step, store.checkout("runs/npz")["weight"].tolist(), store.metadata("runs/npz")["imported from"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.stdout.splitlines() == ["npz", "torch file", "400 [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] npz"]


def test_an_importer_that_is_installed_while_the_process_runs_is_found(
    tmp_path: Path, store: tsck.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.bin").write_bytes(b"mine")
    with pytest.raises(tsck.StoreError, match=r"a\.bin"):
        tsck.import_checkpoint(store, tmp_path / "a.bin", ref="runs/a")
    site = tmp_path / "site"
    (site / "late-1.dist-info").mkdir(parents=True)
    (site / "late-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1\n")
    (site / "late-1.dist-info" / "entry_points.txt").write_text(f"[{outside_importers.GROUP}]\nlate = late_importer:read\n")
    (site / "late_importer.py").write_text(
        "from tensorstore_ck.integrations.importing import ForeignCheckpoint\n"
        "def read(path):\n    return ForeignCheckpoint({'w': 1}) if path.endswith('a.bin') else None\n"
    )
    monkeypatch.syspath_prepend(site)
    assert tsck.import_checkpoint(store, tmp_path / "a.bin", ref="runs/a").contents.format == "late"


def test_the_first_importer_that_knows_the_format_reads_it(
    tmp_path: Path, store: tsck.Store, importers: Callable[[dict[str, Any]], None]
) -> None:
    (tmp_path / "a.bin").write_bytes(b"mine")
    importers(
        {
            "a-other": lambda _: None,
            "b-mine": lambda path: ForeignCheckpoint({"w": torch.ones(2), "from": path}, step=7, metadata={"x": 1}),
            "c-late": lambda _: pytest.fail("it is not asked"),
        }
    )
    found = tsck.import_checkpoint(store, tmp_path / "a.bin", ref="runs/a")
    assert (found.contents.format, found.snapshot.step) == ("b-mine", 7)
    assert found.snapshot.time_ns == (tmp_path / "a.bin").stat().st_mtime_ns
    assert store.checkout("runs/a")["from"] == str(tmp_path / "a.bin")


def _fails(_: str) -> None:
    raise RuntimeError("out of tune")


@pytest.mark.parametrize(("importer", "said"), [(_fails, "RuntimeError: out of tune"), (lambda _: {"w": 1}, "returned a dict")])
def test_an_importer_that_misbehaves_is_named(
    tmp_path: Path, store: tsck.Store, importers: Callable[[dict[str, Any]], None], importer: Any, said: str
) -> None:
    (tmp_path / "a.bin").write_bytes(b"mine")
    importers({"theirs": importer})
    with pytest.raises(tsck.UnsupportedValueError, match=rf"the importer 'theirs' \(package:theirs\).*{said}"):
        tsck.import_checkpoint(store, tmp_path / "a.bin", ref="runs/a")
