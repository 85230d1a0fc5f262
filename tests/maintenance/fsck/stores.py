"""A small store with one of everything, and ways to break it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.codec import CodecName
from tensorstore_ck.log.cache import MemoryTable, Table
from tensorstore_ck.store import Store

State = dict[str, object]


def state(number: int) -> State:
    generator = torch.Generator().manual_seed(number)
    return {
        "base": torch.arange(3000, dtype=torch.float32),
        "weight": torch.randn(1500, generator=generator),
        "bias": torch.full((3,), float(number)),
        "text": f"step {number}",
        "blob": bytes([number]) * 70_000,
    }


def reopen(backend: Any, table: Table | None = None) -> Store:
    """A handle of a host; without `table` it has no cache."""
    config = read_config(backend)
    assert config is not None
    return Store(make_engine(backend, config, table or MemoryTable(), sleep=lambda _: None))


def begun(*numbers: int, ref: str = "runs/a") -> tuple[MemoryBackend, Store]:
    """A new store with these snapshots on `ref`."""
    backend = MemoryBackend()
    init_store(backend)
    store = reopen(backend)
    for number in numbers:
        store.put_snapshot(state(number), ref=ref, step=number)
    return backend, store


def backend_of(objects: Mapping[str, bytes | None]) -> MemoryBackend:
    """One with these objects; None: not there."""
    backend = MemoryBackend()
    for name, data in objects.items():
        if data is not None:
            backend.put(name, data)
    return backend


def flip(backend: Backend, name: str, at: int = -1) -> None:
    """Changes one bit of an object."""
    data = bytearray(read(backend, name))
    data[at] ^= 1
    backend.replace(name, bytes(data))


def contents(backend: Backend) -> dict[str, bytes]:
    return {name: read(backend, name) for name in names(backend)}


def build(backend: Backend | None = None, *, codec: CodecName = "auto") -> Backend:
    """Snapshots 1 to 3 on runs/a, a branch from the first of them with snapshot 4, a tag, metrics and a mark that came later."""
    backend = backend or MemoryBackend()
    init_store(backend)
    store = reopen(backend)
    for number in (1, 2, 3):
        store.put_snapshot(state(number), ref="runs/a", step=number, metrics={"loss": 1 / number}, codec=codec)
    store.branch("runs/b", "runs/a@1")
    store.checkout("runs/b")
    store.put_snapshot(state(4), ref="runs/b", step=4, codec=codec)
    store.tag("paper", "runs/a@2")
    store.annotate("runs/a@3", {"accuracy": 0.5})
    store.mark("runs/a@3", reason="spike")
    return backend


ADDRESSES = {"runs/a@1": 1, "runs/a@2": 2, "runs/a@3": 3, "runs/b@4": 4, "paper": 2, "runs/b~1": 1}


def names(backend: Backend, prefix: str = "") -> list[str]:
    return sorted(info.name for info in backend.list(prefix))


def read(backend: Backend, name: str) -> bytes:
    return backend.get(name, max_bytes=1 << 30)


def is_exact(restored: State, number: int) -> bool:
    expected = state(number)
    return list(restored) == list(expected) and all(
        torch.equal(value, restored[key]) if isinstance(value, torch.Tensor) else value == restored[key]  # type: ignore[arg-type]
        for key, value in expected.items()
    )


def failing_roots(backend: Backend) -> Iterator[str]:
    """First 12 digits of the roots that cannot be restored; every other one must be exact."""
    store = reopen(backend)
    for snapshot in {snapshot.root: snapshot for snapshot in store.log()}.values():
        try:
            restored = store.checkout(snapshot.root, allow_marked=True)
        except StoreError:
            yield snapshot.root[:12]
        else:
            assert is_exact(restored, snapshot.step or 0)
