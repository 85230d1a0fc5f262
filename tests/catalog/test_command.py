"""The commands, with PostgreSQL."""

from collections.abc import Callable

import pytest

from tests.cli.conftest import Tsck, history, model, tsck

__all__ = ["history", "model", "tsck"]


def test_sync_and_find(history: Tsck, new_schema: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSCK_CATALOG", new_schema())
    assert "in postgresql://tsck@" in history("catalog", "sync").out
    assert history("find", "val_loss = 2.5").out.splitlines()[1].split()[1] == "1"
    assert "1 store" in history("catalog").out
