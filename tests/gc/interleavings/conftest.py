"""How many random schedules: 600 in all (`make soak`: 3,000), or as `--explore=1000000` says (name this folder then)."""

import pytest

from tests.effort import effort


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--explore", type=int, default=effort(600, 3000), help="random schedules in all")


@pytest.fixture
def random_schedules(pytestconfig: pytest.Config) -> int:
    """How many random schedules are drawn in all, over all tests that draw some."""
    count: int = pytestconfig.getoption("explore", effort(600, 3000))
    return count
