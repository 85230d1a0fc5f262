"""The examples that need no trainer run, and end as they say. Those of trainers are run beside the tests of each adapter."""

import ast
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

import tensorstore_ck as tsck
from examples import background_saves, branch_and_compare, find_the_best, import_and_export, keep_and_free, save_and_resume
from tests.documents import REPOSITORY
from tests.effort import PATIENCE_SECONDS

EXAMPLES = REPOSITORY / "examples"
PROGRAMS = [path for path in sorted(EXAMPLES.glob("*.py")) if '__name__ == "__main__"' in path.read_text()]
LONGEST = {
    "accelerate_loop.py",
    "held_weights.py",
    "megatron_layers.py",
    "nvrx_restart.py",
    "ray_train.py",
    "torchft_loop.py",
    "transformers_trainer.py",
    "vllm_plugin.py",
}
"""Of trainers and engines that take more than 60 lines."""


def test_an_example_can_be_read_at_once() -> None:
    long = {path.name for path in EXAMPLES.glob("*.py") if len(path.read_text().splitlines()) >= 60}
    assert long <= LONGEST


def test_wrong_arguments_and_help_print_the_usage_and_make_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(PROGRAMS) >= 19
    for path in PROGRAMS:
        for name in trainer_modules(path):
            monkeypatch.setitem(sys.modules, name, MagicMock())
        for arguments, code in ((["--help"], 0), ([], 2), (["folder", "--no-such-option"], 2)):
            monkeypatch.setattr(sys, "argv", [str(path), *arguments])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(path), run_name="__main__")
            printed = capsys.readouterr()
            assert (ended.value.code, (printed.out or printed.err).split()[:2]) == (code, ["usage:", path.name])
    assert list(tmp_path.iterdir()) == []


def trainer_modules(path: Path) -> set[str]:
    """The modules that a script imports, and the packages that they are in, except torch and what is always there."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {".".join(name.split(".")[:count]) for name in names for count in range(1, name.count(".") + 2)}
    known = {*sys.stdlib_module_names, "torch", "tensorstore_ck", "examples"}
    return {name for name in found if name.partition(".")[0] not in known}


def test_the_page_of_transformers_has_the_whole_script() -> None:
    script = (EXAMPLES / "transformers_trainer.py").read_text()
    assert f"```python\n{script}```" in (REPOSITORY / "docs" / "trainers" / "transformers.md").read_text()


def test_save_and_resume(tmp_path: Path) -> None:
    whole = save_and_resume.main(tmp_path / "whole", 25)
    save_and_resume.main(tmp_path / "cut", 17)  # saved at 15, in the middle of the second epoch
    assert save_and_resume.main(tmp_path / "cut", 25) == whole


def test_background_saves(tmp_path: Path) -> None:
    kept = background_saves.main(tmp_path)
    assert kept[0] == background_saves.STEPS
    assert 3 <= len(kept) <= 5
    assert background_saves.main(tmp_path) == kept


def test_branch_and_compare(tmp_path: Path) -> None:
    names, grown = branch_and_compare.main(tmp_path)
    assert names == ["head"]
    assert grown < 10_000


def test_keep_and_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keep_and_free.main(tmp_path) == [0, 5, 8, 9]
    assert "it frees 2,4" in capsys.readouterr().out


def test_import_and_export(tmp_path: Path) -> None:
    rows = import_and_export.main(tmp_path)
    newest = torch.load(tmp_path / "old" / "step_300.pt", weights_only=True)["model"]["weight"]
    torch.testing.assert_close(rows, newest[:2], rtol=0, atol=0)
    assert (tmp_path / "weights" / "model.safetensors").exists()


def test_find_the_best(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy", reason="needs sqlalchemy, the extra catalog")
    assert find_the_best.main(tmp_path) == ("runs/gpt-large", 30)
    with tsck.open(tmp_path / "store", read_only=True) as store:
        assert "best" in store.tags()


@pytest.mark.slow  # a kernel that imports torch and matplotlib takes seconds
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    import nbformat

    for name in ("PYTHONWARNINGS", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TMPDIR", "XDG_CACHE_HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs: they would be those of one machine"
    nbclient.NotebookClient(
        notebook, timeout=PATIENCE_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("<table" in output.get("data", {}).get("text/html", "") for output in shown)
    assert any("image/png" in output.get("data", {}) for output in shown)
