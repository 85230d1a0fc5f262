"""Fixtures for tests of saves."""

from collections.abc import Iterator

import pytest

from tests.session.save.places import Scene, scene


@pytest.fixture
def place() -> Iterator[Scene]:
    with scene() as made:
        yield made
