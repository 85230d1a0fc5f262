"""Fixtures for tests of staged puts."""

from tests.staging.places import quick

__all__ = ["quick"]
