"""Pinned windows, and copies through them on streams that copy late."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tensorstore_ck.state.byte_sources import pieces
from tensorstore_ck.state.device import side_streams, waited_copies
from tensorstore_ck.state.device.side_streams import DeviceCopy, SideStreams
from tensorstore_ck.state.device.waited_copies import (
    MAX_SLABS,
    OUT_BYTES,
    SLAB_BYTES,
    SMALL_BYTES,
    PieceCopy,
    WaitedCopies,
    Window,
    Windows,
    view_of,
)
from tests.state.samples import tensor

CPU = torch.device("cpu")
COUNT = MAX_SLABS * SLAB_BYTES // OUT_BYTES


class Slabs:
    """Memory that is not pinned, nor touched."""

    def __init__(self) -> None:
        self.taken = 0

    def __call__(self, size_bytes: int) -> Window:
        self.taken += 1
        return np.empty(size_bytes, np.uint8)


class NoWindows(Windows):
    """All are in use."""

    def __init__(self) -> None:
        super().__init__(OUT_BYTES)

    def take(self) -> None:
        return None


def test_windows_are_allocated_once_and_come_back_when_nothing_refers_to_them() -> None:
    slabs = Slabs()
    windows = Windows(OUT_BYTES, slabs)
    taken = [windows.take() for _ in range(COUNT)]
    assert len({each.ctypes.data for each in taken if each is not None}) == COUNT
    assert windows.take() is None
    kept = view_of(taken.pop(), 10)[2:5]  # type: ignore[arg-type]
    assert windows.take() is None
    kept.release()
    del kept
    assert windows.take() is not None
    taken.clear()
    assert all(windows.take() is not None for _ in range(10 * COUNT))
    assert slabs.taken == MAX_SLABS


class Streams:
    """CUDA's streams, as far as they are used: what torch does not wait for by itself is done when something waits for it."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], object]] = []
        self.log: list[str] = []
        self.is_busy = False

    def query(self) -> bool:
        return not self.is_busy

    def wait_event(self, _: object) -> None:
        self.log.append("follows")

    wait_stream = wait_event

    def record_event(self) -> "Streams":
        return self

    def synchronize(self) -> None:
        for copy in self.queued:
            copy()
        self.queued.clear()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()

    @contextmanager
    def on(_: object) -> Iterator[None]:
        yield

    copy = torch.Tensor.copy_

    def later(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert not source.is_conj(), "a copy from a device drops lazy bits"
        assert not source.is_neg(), "a copy from a device drops lazy bits"
        is_one_copy = target.dtype == source.dtype and target.is_contiguous()
        if not non_blocking and is_one_copy:
            return copy(target, source)
        source = source if non_blocking else source.clone()
        found.queued.append(lambda: copy(target, source))
        return target

    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: found)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.Tensor, "copy_", later)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    return found


def views() -> list[torch.Tensor]:
    """Dense and other tensors, below and above the size that takes a window."""
    large = tensor(torch.int32, (400, 300))
    lazy = torch.complex(torch.randn(200, 300), torch.randn(200, 300)).conj()
    return [large, large.t(), large[::2, 3:70], large[0], lazy, lazy.imag, lazy[0, :5].imag, torch.tensor([1j]).conj()[0], large[:0]]


@pytest.mark.parametrize("number", range(len(views())))
def test_what_is_fetched_is_complete(streams: Streams, number: int) -> None:
    found = views()[number]
    expected = found.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if found.numel() else b""
    for windows in (Windows(OUT_BYTES, Slabs()), NoWindows()):
        several = [PieceCopy(found[index], count * found.itemsize) for index, count in pieces(tuple(found.shape), 0, found.numel())]
        assert bytes(WaitedCopies(CPU, windows, windows).fetch(several)) == expected


def test_a_window_is_not_lent_again_while_its_bytes_are_used(streams: Streams) -> None:
    copies = WaitedCopies(CPU, Windows(OUT_BYTES, Slabs()), NoWindows())
    sources = [torch.full((SMALL_BYTES,), number, dtype=torch.uint8) for number in range(2 * COUNT)]
    fetched = [copies.fetch([PieceCopy(source, source.nbytes)]) for source in sources]
    assert all(set(bytes(view)) == {number} for number, view in enumerate(fetched))


@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
def test_what_is_filled_is_complete_and_converted(streams: Streams, stored: torch.dtype) -> None:
    elements = torch.arange(1000, dtype=stored)
    dense, strided = torch.zeros(10, 100), torch.zeros(1000, 2)[:, 0]
    for target in (dense, strided):
        WaitedCopies(CPU, Windows(OUT_BYTES, Slabs()), NoWindows()).fill(target, elements)
    elements.zero_()
    assert [dense.view(-1).tolist(), strided.tolist()] == [list(range(1000))] * 2


def test_copies_follow_work_that_is_queued(streams: Streams) -> None:
    copies = WaitedCopies(CPU, Windows(OUT_BYTES, Slabs()), NoWindows())
    copies.follow()
    assert streams.log == []
    streams.is_busy = True
    copies.follow()
    assert streams.log == ["follows"] * 2


@pytest.mark.parametrize("number", range(len(views())))
def test_background_copies_gather_pieces(streams: Streams, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A tensor that is not dense never exists twice on its device."""
    monkeypatch.setattr(side_streams, "PIECE_BYTES", 10_000)
    largest = 0
    contiguous = torch.Tensor.contiguous

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        if not tensor.is_contiguous():
            largest = max(largest, tensor.nbytes)
        return contiguous(tensor)

    monkeypatch.setattr(torch.Tensor, "contiguous", noted)
    found = views()[number]
    target = torch.zeros(found.shape, dtype=found.dtype)
    copies: Any = SideStreams()
    copies.start([DeviceCopy(found, target)]).wait()
    assert torch.equal(target, found.resolve_conj().resolve_neg())
    assert largest <= 10_000


def test_follow_takes_tensors_of_the_host() -> None:
    waited_copies.follow(torch.ones(1))
    waited_copies.follow(np.ones(1))
    waited_copies.follow_all([None, CPU, torch.device("meta")])
