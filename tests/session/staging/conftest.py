"""Fixtures for tests of staged saves."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.session.staging.places")

from tests.backend.staging.places import PieceStore  # noqa: E402 - after the registration
from tests.session.staging.places import Server, quick  # noqa: E402 - after the registration

__all__ = ["quick"]


@pytest.fixture
def server() -> PieceStore:
    return PieceStore()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The staging folder of a host."""
    return tmp_path / "stage"


@pytest.fixture
def connection() -> Server:
    """Of one process to the server."""
    return Server()
