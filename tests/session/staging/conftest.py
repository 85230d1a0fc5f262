"""Fixtures for tests of staged saves."""

import pytest

pytest.register_assert_rewrite("tests.session.staging.places")

from tests.session.staging.places import quick  # noqa: E402 - after the registration

__all__ = ["quick"]
