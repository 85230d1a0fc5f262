"""Stores of which any object was forged or damaged: each call raises this package's errors only. fuzz/fuzz_store.py goes on with it."""

import random
from typing import Final

import pytest

from tests.effort import effort
from tests.gc.stores import open_store, stay_in_one_thread
from tests.store.hostile_calls import require_only_our_errors
from tests.store.hostile_objects import REF, hostile, pristine

STORES: Final = effort(60, 1000)


def test_the_store_has_each_kind_of_object() -> None:
    folders = {name.partition("/")[0] for name in pristine()}
    assert folders == {"store.json", "log", "checkpoint", "packs", "parts", "snapshots", "moved", "writers"}


@pytest.mark.slow
def test_no_call_meets_another_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)
    for seed in range(STORES):
        backend = hostile(random.Random(seed))
        require_only_our_errors(lambda backend=backend: open_store(backend), REF, f"store {seed}")  # type: ignore[misc]
