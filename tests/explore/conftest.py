"""How many random schedules: 3,000 in all unless `--explore=1000000` says otherwise (name this folder on the command line then)."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--explore", type=int, default=3000, help="random schedules in all")


@pytest.fixture
def random_schedules(pytestconfig: pytest.Config) -> int:
    """How many random schedules are drawn in all, over all tests that draw some."""
    count: int = pytestconfig.getoption("explore", 3000)
    return count
