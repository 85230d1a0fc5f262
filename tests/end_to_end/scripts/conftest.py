"""How often ranks are killed: few times here; ``pytest tests/scripts --kills 10 --seed 7`` for more."""

import pytest

from tests.effort import effort


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=effort(1, 2), help="how often test_torchrun kills a rank")
    parser.addoption("--seed", type=int, default=1, help="of the moments of the kills")
