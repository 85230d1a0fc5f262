"""Runs torchtitan's own tests of its checkpoint manager against SnapshotManager: ``judge_torchtitan.py CHECKOUT``.

It needs the environment of `make test-apart`. CHECKOUT: torchtitan's sources of August 18, 2026 (862f966a3), whose checkpoint manager is
that of version 0.3.0: the package has no tests, and the repository no tag. Prints what failed, which docs/trainers.md explains.
"""

import copy
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.checkpointer import dcp

import tensorstore_ck as tsck

TESTS = "tests/unit_tests/test_checkpoint.py"


class Stored(tsck.titan.SnapshotManager):
    """With a store next to the folder in which torchtitan's manager would write."""

    @dataclass(kw_only=True, slots=True)
    class Config(tsck.titan.SnapshotManager.Config):
        """The same."""

    def __init__(self, config: Any, *, base_folder: str = "", **given: Any) -> None:
        config = copy.copy(config)
        config.store, config.ref = os.path.join(base_folder, f"{config.folder}.store"), "runs/judged"
        super().__init__(config, base_folder=base_folder, **given)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    dcp.CheckpointManager = Stored
    sys.exit(pytest.main([str(Path(sys.argv[1]) / TESTS), "-q", "-rf", "--tb=line", "-c", os.devnull]))
