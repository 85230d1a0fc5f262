"""Fixtures for tests of staged puts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ranks.pool import Pool

pytest.register_assert_rewrite("tests.staging.places")

from tests.staging.places import quick  # noqa: E402 - after the registration

__all__ = ["quick"]


@pytest.fixture(scope="module")
def pool() -> "Iterator[Pool]":
    """Ranks of this module's own: after other tests in the same processes some of these hung, which is not explained yet."""
    from tests.ranks.pool import Pool

    with Pool() as started:
        yield started
