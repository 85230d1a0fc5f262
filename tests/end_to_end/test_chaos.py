"""Random faults over a staging disk that two processes share: nothing acknowledged is lost. See `chaos`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import PATIENCE_SECONDS, SOAK

MINUTES = 60.0 if SOAK else 0.3


@pytest.mark.slow
@pytest.mark.race
@pytest.mark.timeout(60 * MINUTES + 5 * PATIENCE_SECONDS)
def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.end_to_end.chaos", "--minutes", str(MINUTES), "--folder", str(tmp_path / "chaos")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["acknowledged"]
