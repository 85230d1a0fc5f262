"""A fixture for tests of operations that builds before them ignore."""

from collections.abc import Callable
from importlib import import_module

import pytest

from tensorstore_ck.log import operations


@pytest.fixture
def forget_operation(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From its call on, this is a build that does not know the operation."""

    def forget(unknown: str) -> None:
        folding = import_module("tensorstore_ck.log.fold")
        monkeypatch.setattr(operations, "SCHEMA", {name: each for name, each in operations.SCHEMA.items() if name != unknown})
        monkeypatch.setattr(folding, "_APPLY", {name: each for name, each in folding._APPLY.items() if name != unknown})

    return forget
