"""Ranks of one host, as threads with stores of their own: each block is fetched once, and all get its bytes whatever happens to a peer."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.engine.read.block_reader import BufferTarget
from tensorstore_ck.engine.read.snapshot_reader import open_snapshot
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.store_config import CONFIG_NAME, new_config
from tensorstore_ck.session.group.host_shared_reads import HostSharedReads, host_key
from tensorstore_ck.store import Store
from tests.effort import PATIENCE_SECONDS
from tests.gc.stores import contents, open_store

TENSORS = 12
ELEMENTS = 400_000
"""Several blocks each."""
BLOCK_BYTES = 128 << 10
WINDOW_BYTES = 1_000_000
EVERY = 10_000


def tensor(number: int) -> torch.Tensor:
    return torch.randint(0, 1 << 62, (ELEMENTS // 4,), generator=torch.Generator().manual_seed(number))


class Reads:
    """The backend of one host: counts how often every so-manieth byte of a pack is read. The layout lies before the first."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.bytes: Counter[tuple[str, int]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        self.bytes.update((name, at) for at in range(-(-offset // EVERY) * EVERY, offset + len(memory), EVERY) if at)
        self._backend.read_into(name, offset, memory)


@pytest.fixture(scope="module")
def template() -> dict[str, bytes]:
    backend = MemoryBackend()
    backend.create(CONFIG_NAME, replace(new_config(exclusive_create=True), block_bytes=BLOCK_BYTES).encode())
    with open_store(backend) as store:
        store.put_snapshot({str(number): tensor(number) for number in range(TENSORS)}, ref="job", codec="raw")
    return contents(backend)


@pytest.fixture
def backend(template: dict[str, bytes]) -> Reads:
    backend = MemoryBackend()
    for name, data in template.items():
        backend.put(name, data)
    return Reads(backend)


class Host:
    """Runs one read on each rank."""

    def __init__(self, base: Path, backend: Any, ranks: int, *, window_bytes: int = WINDOW_BYTES) -> None:
        self.base = base
        self.ranks = ranks
        self.hosts = [
            HostSharedReads("restore", rank, base=base, window_bytes=window_bytes, timeout=PATIENCE_SECONDS) for rank in range(ranks)
        ]
        self.backends = [backend] * ranks
        self.got: dict[int, dict[int, bytes]] = {}
        self.errors: dict[int, BaseException] = {}

    def run(self, wants: Sequence[Sequence[int]], *, before: Callable[[int], object] = lambda _: None, rounds: int = 1) -> None:
        """`wants`: the tensors that each rank reads, `rounds` at a time."""
        for host in self.hosts:
            host.join(range(self.ranks))

        def work(rank: int) -> None:
            try:
                before(rank)
                self.got[rank] = {}
                store = open_store(self.backends[rank])
                store.engine.log.sync()
                for number in range(rounds):
                    self.got[rank] |= read(store, self.hosts[rank], wants[rank][number::rounds])
            except BaseException as exc:  # noqa: BLE001 - tests look at it
                self.errors[rank] = exc
            finally:
                self.hosts[rank].close()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def require(self, wants: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
        for rank in ranks:
            assert rank not in self.errors, self.errors[rank]
            assert self.got[rank] == {number: tensor(number).numpy().tobytes() for number in wants[rank]}
        assert not list(self.base.iterdir()), "nothing is left"


def read(store: Store, host: HostSharedReads, tensors: Sequence[int]) -> dict[int, bytes]:
    info = store.engine.log.newest_view().snapshot(store.engine.resolve("job").info.ulid)
    assert info is not None
    reader = open_snapshot(store.engine, info, host.read)
    numbers = {int(spec.name): number for number, spec in enumerate(reader.layout.tensors)}
    memory = {each: bytearray(ELEMENTS * 2) for each in tensors}
    reader.read({numbers[each]: BufferTarget(memoryview(memory[each])) for each in tensors})
    return {each: bytes(data) for each, data in memory.items()}


ALL = list(range(TENSORS))
ALL_FOUR = [ALL] * 4
WANTS = {
    "all the same": ALL_FOUR,
    "some": [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7, 11], [11]],
    "nothing in common": [[0, 1], [2, 3], [4, 5], [6]],
    "one has nothing": [[0, 1], [], [0, 1], [1, 0]],
}


@pytest.mark.parametrize(("wants", "rounds"), [*((each, 1) for each in WANTS.values()), (ALL_FOUR, 2), (WANTS["some"], 2)])
def test_each_block_is_fetched_once(tmp_path: Path, backend: Reads, wants: list[list[int]], rounds: int) -> None:
    host = Host(tmp_path, backend, 4)
    host.run(wants, rounds=rounds)
    host.require(wants, range(4))
    if rounds == 1 or wants is ALL_FOUR:  # what two ranks want in different rounds is read twice
        assert set(backend.bytes.values()) == {1}
    assert sum(backend.bytes.values()) >= len({each for several in wants for each in several}) * ELEMENTS * 2 // EVERY


def test_a_rank_alone(tmp_path: Path, backend: Reads) -> None:
    host = Host(tmp_path, backend, 1)
    host.run([ALL])
    host.require([ALL], [0])


class Dying(HostSharedReads):
    """Dies, as far as others can tell, at its k-th wait."""

    left = 0

    def wait(self, is_so: Callable[[], bool], on: int) -> bool:
        self.left -= 1
        if self.left == 0:
            self.leave()
        return super().wait(is_so, on)


@pytest.mark.race
@pytest.mark.parametrize("at", range(1, 40, 5))
def test_a_rank_dies_anywhere(tmp_path: Path, backend: Reads, at: int) -> None:
    """The others read for themselves what it should have passed on."""
    host = Host(tmp_path, backend, 3)
    host.hosts[1].close()
    dying = Dying("restore", 1, base=tmp_path, window_bytes=WINDOW_BYTES, timeout=PATIENCE_SECONDS)
    dying.left = at
    host.hosts[1] = dying
    host.run([ALL] * 3)
    host.require([ALL] * 3, [0, 1, 2])


def test_a_rank_never_comes(tmp_path: Path, backend: Reads) -> None:
    host = Host(tmp_path, backend, 3)
    host.hosts[2].close()
    host.run([ALL] * 3, before=lambda rank: exit_thread() if rank == 2 else None)
    host.require([ALL] * 3, [0, 1])


def exit_thread() -> None:
    raise SystemExit


@pytest.mark.parametrize("who", ["one", "all"])
def test_no_memory_to_share(tmp_path: Path, backend: Reads, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    def refuse(file: int, offset: int, size: int, reserve: Callable[[int, int, int], None] = os.posix_fallocate) -> None:
        refused.append(size)
        if who == "all" or len(refused) == 2:
            raise OSError(28, "No space left on device")
        reserve(file, offset, size)

    refused: list[int] = []
    monkeypatch.setattr("os.posix_fallocate", refuse)
    host = Host(tmp_path, backend, 3)
    host.run([ALL] * 3)
    assert refused
    host.require([ALL] * 3, range(3))


def test_no_folder_to_share(tmp_path: Path, backend: Reads) -> None:
    host = Host(tmp_path / "missing", backend, 2)
    (tmp_path / "missing").mkdir()
    host.run([ALL] * 2)
    host.require([ALL] * 2, range(2))


def test_damage_is_found_by_all_who_need_it(tmp_path: Path, backend: Reads) -> None:
    """The rank that fetches it does not pass it on."""
    (pack,) = [name for name in contents(backend._backend) if name.startswith("packs/")][-1:]
    data = bytearray(backend.get(pack, max_bytes=1 << 30))
    data[len(data) // 2] ^= 1
    backend.delete([pack])
    backend.put(pack, bytes(data))
    host = Host(tmp_path, backend, 3)
    host.run([ALL] * 3)
    assert all(isinstance(error, CorruptObjectError) for error in host.errors.values())
    assert len(host.errors) == 3
    assert not list(tmp_path.iterdir())


def test_what_killed_ranks_left_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, young, alive = tmp_path / "tsck-old", tmp_path / "tsck-young", tmp_path / "tsck-alive"
    for folder in (old, young):
        folder.mkdir()
        (folder / "alive-0").touch()
    running = HostSharedReads("alive", 0, base=tmp_path)
    for folder in (old, alive):
        os.utime(folder, (0, 0))
    HostSharedReads("new", 0, base=tmp_path).close()
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["tsck-alive", "tsck-young"]
    running.close()


def test_a_window_is_bounded(tmp_path: Path, backend: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def reserve(file: int, offset: int, size: int) -> None:
        sizes.append(size)
        os.ftruncate(file, size)

    monkeypatch.setattr("os.posix_fallocate", reserve)
    host = Host(tmp_path, backend, 2, window_bytes=WINDOW_BYTES // 2)
    host.run([ALL] * 2)
    host.require([ALL] * 2, range(2))
    assert max(sizes) <= WINDOW_BYTES // 2 + BLOCK_BYTES + (1 << 16), "one block at least"
    assert sum(sizes) > 2 * max(sizes)


def test_the_key_of_a_host(tmp_path: Path) -> None:
    assert host_key(tmp_path) == host_key(tmp_path) != b""
    assert host_key(tmp_path) != host_key(tmp_path.parent)
    assert host_key(tmp_path / "missing") == b""
