"""A store with a training state, and the small windows that small tensors need to have several."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.integrations.exporting import ExportReport, blocks_to_files, byte_routing, export_snapshot, output_file
from tests.gc.stores import open_store
from tests.integrations.exporting.states import small_blocks, training_state, without_unsavable

Export = Callable[..., ExportReport]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_file, "PIECE_BYTES", 8192)
    monkeypatch.setattr(blocks_to_files, "MIN_BYTES", 1)
    monkeypatch.setattr(blocks_to_files, "COPY_BYTES", 1000)
    monkeypatch.setattr(byte_routing, "WINDOW_BYTES", 8192)
    monkeypatch.setattr(byte_routing, "BATCH_BYTES", 20000)


@pytest.fixture
def state() -> dict[str, Any]:
    return training_state()


@pytest.fixture
def store(state: dict[str, Any]) -> Iterator[tsck.Store]:
    """Holds `state` as ``run``."""
    with open_store(small_blocks()) as opened:
        opened.put_snapshot(state, ref="run", step=3, metadata={"author": "me", "lr": 3e-4})
        yield opened


@pytest.fixture
def unsavable(store: tsck.Store, state: dict[str, Any]) -> list[str]:
    """What of ``run`` torch itself cannot save; taken out of `state`."""
    return without_unsavable(state)


@pytest.fixture
def export(store: tsck.Store) -> Export:
    """Exports ``run``."""

    def run(path: Path, format: str, **options: Any) -> ExportReport:  # noqa: A002
        return export_snapshot(store, "run", path, format=format, **options)  # type: ignore[arg-type]

    return run
