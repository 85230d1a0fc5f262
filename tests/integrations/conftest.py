"""Fixtures for tests with real ranks."""

from tests.session.group.conftest import folder

__all__ = ["folder"]
