"""The example of the Accelerator, in two runs and in one."""

from pathlib import Path

import accelerate

from examples import accelerate_loop


def run(folder: Path, epochs: int) -> float:
    for kind in (accelerate.state.AcceleratorState, accelerate.state.GradientState):
        kind._reset_state()
    return accelerate_loop.main(folder, epochs)


def test_it_continues(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "cut", 2)
    assert run(tmp_path / "cut", 4) == whole
