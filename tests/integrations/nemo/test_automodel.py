"""NeMo Automodel's checkpointer, as examples/nemo_automodel.py has it."""

from pathlib import Path

import pytest

pytest.importorskip("nemo_automodel", reason="NeMo Automodel is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tests.integrations.rank_runs import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_checkpointer_of_the_example(tmp_path: Path) -> None:
    """Also after a run that was killed between its two saves of a step."""
    said = run_ranks("tests.integrations.nemo.automodel_job", tmp_path)
    assert [(each["differed"], each["is_loaded"], each["is_same"]) for each in said] == [(True, True, True)] * 2
    assert not [name for each in said for name in each["files"] if name.endswith((".distcp", ".safetensors"))]
    with tsck.open(tmp_path / "store", read_only=True) as store:
        assert {name: store.resolve(name).step for name in store.branches()} == {"runs/nemo/model": 3, "runs/nemo/optim": 3}
