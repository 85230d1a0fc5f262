"""A clock that tests move, and a build that does not know an operation."""

from collections.abc import Callable
from importlib import import_module

import pytest

from tensorstore_ck.log import operations
from tests.gc.stores import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def forget_operation(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From its call on, this is a build that does not know the operation."""

    def forget(unknown: str) -> None:
        folding = import_module("tensorstore_ck.log.fold")
        monkeypatch.setattr(operations, "SCHEMA", {name: each for name, each in operations.SCHEMA.items() if name != unknown})
        monkeypatch.setattr(folding, "_APPLY", {name: each for name, each in folding._APPLY.items() if name != unknown})

    return forget
