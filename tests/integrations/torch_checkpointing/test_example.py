"""The example of the CheckpointManager, in two runs and in one."""

from pathlib import Path

from examples import torch_checkpointing_loop


def test_it_continues(tmp_path: Path) -> None:
    whole = torch_checkpointing_loop.main(tmp_path / "whole", 20)
    torch_checkpointing_loop.main(tmp_path / "cut", 10)
    assert torch_checkpointing_loop.main(tmp_path / "cut", 20) == whole
