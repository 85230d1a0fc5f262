"""Megatron Bridge: its `custom_manager_class`, as examples/megatron_bridge.py has it."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron Bridge is not installed: `make test-apart` runs this with the newest Megatron-core", allow_module_level=True)

from tests.effort import effort
from tests.integrations.rank_runs import ends, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("saving", effort(["async"], ["sync", "async"]))
def test_the_manager_of_the_example(tmp_path: Path, saving: str) -> None:
    (said,) = ends(run_ranks("tests.integrations.megatron.bridge_job", tmp_path, saving, ranks=1), "found")
    assert "'examples.megatron_bridge.CheckpointManager' is not allowed" in said["refused"]
    assert (said["found"], said["step"]) == ([2, 7], 2)
    assert {"metadata.json", "snapshot.json", "run_config.yaml", "train_state.pt"} <= set(said["files"])
    assert not [name for name in said["files"] if "distcp" in name]
    assert said["is_loaded"]
    assert said["is_same"]
    assert said["numbers"][0] == said["numbers"][1]
