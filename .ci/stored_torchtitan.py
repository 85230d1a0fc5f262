"""A plugin of pytest for torchtitan's own tests of its checkpoint manager, with SnapshotManager in its place.

`make test-trainers TRAINERS=torchtitan` runs those of August 18, 2026, whose checkpoint manager is that of version 0.3.0: its package has
no tests, and its repository no tag. With `JUDGED_STOCK=1` in the environment the manager stays torchtitan's own.
"""

import copy
import os
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import dcp

import tensorstore_ck as tsck


class Stored(tsck.titan.SnapshotManager):
    """With a store next to the folder in which torchtitan's manager would write."""

    @dataclass(kw_only=True, slots=True)
    class Config(tsck.titan.SnapshotManager.Config):
        """The same."""

    def __init__(self, config: Any, *, base_folder: str = "", **given: Any) -> None:
        config = copy.copy(config)
        config.store, config.ref = os.path.join(base_folder, f"{config.folder}.store"), "runs/judged"
        super().__init__(config, base_folder=base_folder, **given)


if "JUDGED_STOCK" not in os.environ:
    dcp.CheckpointManager = Stored
