"""A store, what is imported into it, and what it gives back."""

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.integrations.importing import CheckpointContents, import_checkpoint
from tests.gc.stores import open_store

Bring = Callable[..., tuple[Any, CheckpointContents]]
Refuse = Callable[..., str]


@pytest.fixture
def store() -> Iterator[tsck.Store]:
    with open_store() as store:
        yield store


@pytest.fixture
def bring(store: tsck.Store) -> Bring:
    """Imports a path; what the store then gives back, and what was said of it."""

    def bring(path: Path, **options: Any) -> tuple[Any, CheckpointContents]:
        snapshot, contents = import_checkpoint(store, path, ref="old", expect=tsck.ANY, **options)
        return store.checkout(snapshot.root), contents

    return bring


@pytest.fixture
def refuse(store: tsck.Store) -> Refuse:
    """Imports a path that must be refused, with nothing of it in the store; the message."""

    def refuse(path: Path, error: type[tsck.StoreError] = tsck.StoreError, **options: Any) -> str:
        with pytest.raises(error) as caught:
            import_checkpoint(store, path, ref="new", **options)
        assert "new" not in store.branches()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refuse


def archive(path: Path, code: bytes, records: dict[str, bytes] | None = None, **options: Any) -> Path:
    """A torch file with this pickle."""
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("a/data.pkl", code)
        for name, data in {"version": b"3\n", "byteorder": b"little", **(records or {})}.items():
            file.writestr(f"a/{name}", data)
    return path
