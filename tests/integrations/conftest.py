"""Fixtures for tests with real ranks."""

from tests.ranks.conftest import folder

__all__ = ["folder"]
