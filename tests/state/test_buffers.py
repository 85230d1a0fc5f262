"""Captures that are copied: the state may be changed at once, memory is reused, and never more than the limit."""

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.engine.interfaces import CapturedState, ListedSources
from tensorstore_ck.errors import InvalidOptionError, NoSpaceError
from tensorstore_ck.format.codec import compiled
from tensorstore_ck.state import Box, Boxes, FlatShard, capture, capture_copy, restore, tensor_table
from tensorstore_ck.state.byte_sources import BytesSource, address_of, memory_at
from tensorstore_ck.state.capture_copy import Arena, Slot, copy_captured, slot_bytes
from tensorstore_ck.state.device.side_streams import DeviceCopy, SideStreams
from tensorstore_ck.state.sharded_tensors import SpreadDescriber
from tests.state.fake import FakeContent, assert_same, bits
from tests.state.samples import DTYPES, NUMPY_DTYPES, states, tensor

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")  # deepcopy
MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 * MIB)
    yield made
    made.close()


def try_take(arena: Arena, size_bytes: int) -> Slot | None:
    slot = Slot(arena, size_bytes)
    return slot if arena.fill(slot) else None


def take(arena: Arena, size_bytes: int) -> Slot:
    slot = try_take(arena, size_bytes)
    assert slot is not None
    return slot


def take_for(arena: Arena, captured: CapturedState, skip: Collection[int] = ()) -> Slot:
    return take(arena, slot_bytes(captured, skip))


def copied(arena: Arena, state: Any, describer: SpreadDescriber | None = None) -> CapturedState:
    captured = capture(state, describer)
    return copy_captured(captured, take_for(arena, captured), threads=2)


def overwrite(value: Any) -> None:
    """Changes all memory of all tensors and arrays."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        memory_at(storage.data_ptr(), storage.nbytes())[:] = b"\xa5" * storage.nbytes()
    elif isinstance(value, np.ndarray):
        root = value
        while isinstance(root.base, np.ndarray):
            root = root.base
        np.lib.stride_tricks.as_strided(root.reshape(-1).view(np.uint8), (root.nbytes,), (1,))[...] = 0xA5
    elif isinstance(value, dict):
        overwrite(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            overwrite(item)


def assert_kept(arena: Arena, state: Any, threads: int = 2) -> None:
    """What was copied is what the state was before it was changed."""
    expected = copy.deepcopy(state)
    captured = capture(state)
    slot = take_for(arena, captured)
    copied = copy_captured(captured, slot, threads=threads)
    overwrite(state)
    assert_same(restore(FakeContent(copied)), expected)
    slot.release()


# --- what is copied ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(arena: Arena, dtype: torch.dtype) -> None:
    bases = [tensor(dtype, (7, 6, 5), seed) for seed in range(4)]
    views = [bases[0][1], bases[1].transpose(0, 2), bases[2][::2, 1:, ::3], bases[3][:, 2]]
    assert_kept(arena, [tensor(dtype, ()), tensor(dtype, (0,)), tensor(dtype, (3, 0, 2)), tensor(dtype, (11,)), *views])


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_numpy_dtype(arena: Arena, dtype: str) -> None:
    def array() -> Any:
        return np.frombuffer(bytearray(b"\0\1" * 42 * np.dtype(dtype).itemsize), dtype).reshape(7, 12).copy()

    assert_kept(arena, [array(), array().T, array()[::-2, 1:], array()[3:4, :0], array()[0, 0:1].reshape(())])


def test_conjugate_negative_and_expanded_views(arena: Arena) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conj": z.clone().conj(), "neg": z.clone().conj().imag, "expanded": torch.arange(3.0).view(3, 1).expand(3, 4)}
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    found = copied(arena, state)
    overwrite(state)
    back = restore(FakeContent(found))
    assert back["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert back["neg"].tolist() == [-2.0, 4.0]
    assert back["expanded"].tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]


def test_shared_memory_stays_shared(arena: Arena) -> None:
    base, grid = torch.arange(100.0), torch.arange(60, dtype=torch.bfloat16).view(6, 10)
    array = np.arange(50)
    state = {"all": base, "tail": base[50:], "rows": grid[1:4], "more": grid[3:], "cols": grid.t()[2:4], "a": array[:30], "b": array[20:]}
    expected = copy.deepcopy(state)
    found = copied(arena, state)
    overwrite(state)
    back = restore(FakeContent(found))
    assert_same(back, expected)
    back["rows"][2] = 7
    assert back["more"][0].tolist() == [7] * 10


def test_shards_of_tensors_that_are_spread(arena: Arena) -> None:
    grid, flat, strided = torch.arange(24.0).view(6, 4), torch.arange(50), torch.arange(12.0).view(3, 4).t()
    boxes = Boxes([Box(local, (9, 4), offsets) for local, offsets in ((grid[:2], (0, 0)), (strided, (2, 0)), (grid[:0], (9, 0)))])
    state = {"boxes": boxes, "flat": FlatShard(flat, (10, 10), 20), "none": Box(torch.empty(0, dtype=torch.int8), (9,), (0,))}
    expected = [[bits(grid[:2]), bits(strided)], [bits(flat)], []]
    found = copied(arena, state, SpreadDescriber({0: 0}, 0))
    overwrite([grid, flat, strided])
    for source, runs in zip(found.sources, expected, strict=True):
        assert source.size_bytes == sum(map(len, runs))
        at = 0
        for run in runs:
            assert bytes(source.read(at, at + len(run))) == run
            at += len(run)


class Made:
    """A `ByteSource` that makes its bytes when they are read."""

    def __init__(self, fill: int) -> None:
        self.fill = fill
        self.size_bytes = 100

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(bytearray([self.fill] * (stop - start)))


def test_bytes_that_are_no_tensors(arena: Arena) -> None:
    captured = capture([torch.zeros(100, dtype=torch.uint8) for _ in range(4)])
    captured = captured._replace(sources=ListedSources([Made(1), Made(2), Made(3), BytesSource(b"4" * 100)]))
    copied = copy_captured(captured, take_for(arena, captured), threads=2)
    assert [bytes(source.read(0, 100)) for source in copied.sources] == [b"\1" * 100, b"\2" * 100, b"\3" * 100, b"4" * 100]


@pytest.mark.parametrize("has_kernel", {False, compiled.HAS_KERNEL})
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_large_tensors_are_cut_and_small_ones_go_together(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, threads: int, has_kernel: bool
) -> None:
    monkeypatch.setattr(capture_copy, "PIECE_BYTES", 1000)
    monkeypatch.setattr(capture_copy, "MAX_PIECE_BYTES", 3001)
    monkeypatch.setattr(tensor_table, "SMALL_BYTES", 100)
    monkeypatch.setattr(compiled, "HAS_KERNEL", has_kernel)
    sizes = [5, 20_000, 999, 1000, 1001, 1, 0, 64, 3001, 3002, 12_345, *range(200)]
    assert_kept(arena, [tensor(torch.uint8, (size,), seed) for seed, size in enumerate(sizes)], threads)


@settings(max_examples=40)
@given(states)
def test_any_state(state: Any) -> None:
    assert_kept(Arena(4 * MIB), state)


@settings(max_examples=100)
@given(st.data())
def test_any_strides(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4))
    view = tensor(data.draw(st.sampled_from([torch.bfloat16, torch.int8, torch.complex64, torch.complex128, torch.float64])), tuple(shape))
    view = view.permute(data.draw(st.permutations(range(view.dim()))))
    for dim in range(view.dim()):
        first, step = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 3))
        view = view[(slice(None),) * dim + (slice(first, None, step),)]
    assert_kept(Arena(4 * MIB), {"x": view})


def test_what_is_skipped_stays_where_it_is(arena: Arena) -> None:
    state = [torch.zeros(1000), torch.zeros(1000), torch.zeros(10, 10).t()]
    captured = capture(state)
    slot = take_for(arena, captured, skip={0, 2})
    assert slot.size_bytes < slot_bytes(captured) < 3 * 4096
    copied = copy_captured(captured, slot, skip={0, 2}, threads=2)
    overwrite(state)
    assert bytes(copied.sources[0].read(0, 4)) == b"\xa5" * 4
    assert bytes(copied.sources[1].read(0, 4000)) == bytes(4000)
    assert bytes(copied.sources[2].read(0, 4)) == b"\xa5" * 4
    assert copied.layout is captured.layout


def test_sources_are_a_sequence(arena: Arena) -> None:
    captured = capture([torch.tensor([number]) for number in range(5)])
    sources = copy_captured(captured, take_for(arena, captured), threads=1).sources
    assert len(sources) == 5
    assert [bytes(source.read(0, 1)) for source in sources[-2:]] == [b"\3", b"\4"]
    assert bytes(sources[-5].read(0, 1)) == b"\0"
    with pytest.raises(IndexError):
        sources[5]


def test_the_copy_keeps_its_memory_and_not_the_state(arena: Arena) -> None:
    whole = np.arange(1000)
    captured = capture([whole])
    copied = copy_captured(captured, take_for(arena, captured), threads=1)
    del captured
    whole.resize(0)  # refused as long as anybody refers to it
    arena.close()
    (source,) = copied.sources
    del arena, copied
    assert bytes(source.read(0, 8000)) == np.arange(1000).tobytes()


def test_a_slot_that_does_not_do(arena: Arena) -> None:
    captured = capture([torch.zeros(1000)])
    slot = take(arena, 3999)
    with pytest.raises(InvalidOptionError, match="4032 bytes of a slot, and this one has 3999"):
        copy_captured(captured, slot, threads=1)
    slot.release()
    with pytest.raises(InvalidOptionError, match="was released"):
        copy_captured(captured, slot, threads=1)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_reused(arena: Arena) -> None:
    first = take(arena, 5 * MIB)
    memory = address_of(held(first))
    first.release()
    for size in (5 * MIB, 6 * MIB, 3 * MIB):  # a little more or less is the same memory
        again = take(arena, size)
        assert address_of(held(again)) == memory
        assert arena.allocated_bytes == arena._in_use_bytes == 6 * MIB
        again.release()
    assert (arena.allocated_bytes, arena._in_use_bytes) == (6 * MIB, 0)


def test_the_limit_is_hard() -> None:
    arena = Arena(10 * MIB + 5)
    assert try_take(arena, 10 * MIB + 6) is None
    first = take(arena, 6 * MIB)
    assert try_take(arena, 5 * MIB) is None
    second = take(arena, 4 * MIB + 5)
    assert arena.allocated_bytes == arena._in_use_bytes == 10 * MIB + 5
    assert try_take(arena, 0) is None
    second.release()
    first.release()
    assert len(held(take(arena, 10 * MIB + 5))) == 10 * MIB + 5
    assert arena.allocated_bytes == 10 * MIB + 5


def test_too_small_free_memory_is_released() -> None:
    arena = Arena(12 * MIB)
    slots = [take(arena, size * MIB) for size in (6, 2, 4)]
    for slot in slots:
        slot.release()
    assert len(held(take(arena, 3 * MIB))) == 4 * MIB  # of those that are large enough, the smallest
    assert len(held(take(arena, 8 * MIB))) == 8 * MIB
    assert (arena.allocated_bytes, arena._in_use_bytes) == (12 * MIB, 12 * MIB)


def test_small_captures_leave_large_memory_to_large_ones() -> None:
    arena = Arena(12 * MIB)
    take(arena, 8 * MIB).release()
    small = take(arena, 10)
    assert len(held(small)) == 2 * MIB
    large = take(arena, 8 * MIB)
    assert arena.allocated_bytes == 10 * MIB
    assert len(held(take(arena, 10))) == 2 * MIB
    large.release()
    assert len(held(take(arena, 10))) == 8 * MIB  # there is no space for more


def test_a_slot_is_taken_back_once_and_freed_when_the_arena_is_closed() -> None:
    arena = Arena(8 * MIB)
    slot = take(arena, MIB)
    slot.release()
    again = take(arena, MIB)
    slot.release()
    assert arena._in_use_bytes == 2 * MIB
    free = take(arena, MIB)
    assert held(free) is not held(again)
    free.release()
    arena.close()
    assert arena.allocated_bytes == 2 * MIB
    again.release()
    assert arena.allocated_bytes == 0
    arena.close()


def test_many_threads_stay_below_the_limit() -> None:
    arena = Arena(16 * MIB)
    wrong: list[object] = []

    def work(seed: int) -> None:
        for number in range(200):
            slot = try_take(arena, (seed * 7 + number * 13) % 9 * MIB)
            if arena.allocated_bytes > arena.limit_bytes:
                wrong.append(arena.allocated_bytes)
            if slot is not None:
                held(slot)[0] = seed
                if held(slot)[0] != seed:
                    wrong.append(seed)
                slot.release()
                slot.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert arena._in_use_bytes == 0


def test_a_system_without_memory_is_named() -> None:
    with pytest.raises(NoSpaceError, match="lower host_memory_bytes"):
        try_take(Arena(1 << 62), 1 << 60)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_a_child_process_does_not_double_the_memory(arena: Arena) -> None:
    slot = take(arena, 4 * MIB)
    at = address_of(held(slot))
    mapping = range(0)
    flags = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            mapping = range(*(int(number, 16) for number in first.split("-")))
        elif first == "VmFlags:" and at in mapping:
            flags = rest
    assert "wf" in flags  # wiped on fork


# --- devices ----------------------------------------------------------------------------------------------------------


class LateCopies:
    """`DeviceCopies` that come when they are waited for."""

    def __init__(self) -> None:
        self.waits = 0
        self.left: list[DeviceCopy] = []

    def start(self, copies: Sequence[DeviceCopy]) -> "LateCopies":
        self.left = [DeviceCopy(tensor.clone(), target) for tensor, target in copies]
        return self

    def hold_streams(self, stream_of: object = None) -> None:
        pass

    def wait(self) -> None:
        self.waits += 1
        for source, target in self.left:
            target.copy_(source)
        self.left = []


@pytest.fixture
def late(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    """Tensors that are not contiguous are on a device."""
    monkeypatch.setattr(capture_copy, "is_on_device", lambda found: isinstance(found, torch.Tensor))
    arena.device_copies = made = LateCopies()
    return made


def test_copies_from_a_device_are_waited_for_when_they_are_read(arena: Arena, late: LateCopies) -> None:
    state = [torch.arange(5), torch.arange(12.0).view(3, 4).t(), torch.arange(6, dtype=torch.bfloat16).view(2, 3).t()]
    expected = [bits(each) for each in state]
    found = copied(arena, state)
    overwrite(state)
    assert bytes(found.sources[0].read(0, 40)) == expected[0]
    assert late.waits == 0
    assert len(late.left) == 2
    for source, data in zip(found.sources, expected, strict=True):
        assert source.size_bytes == len(data)
        assert bytes(source.read(0, len(data))) == data


def test_pieces_on_a_device(arena: Arena, late: LateCopies) -> None:
    near, far, last = torch.arange(8.0).view(2, 4), torch.arange(12.0).view(3, 4).t(), torch.arange(3.0)
    boxes = [Box(near, (9, 4), (0, 0)), Box(far, (9, 4), (2, 0)), Box(last.view(1, 3), (9, 4), (6, 0))]
    found = copied(arena, {"x": Boxes(boxes)}, SpreadDescriber({0: 0}, 0))
    expected = bits(near) + bits(far) + bits(last)
    overwrite([near, far, last])
    assert bytes(found.sources[0].read(0, 92)) == expected
    assert late.waits == 1


def test_memory_is_not_reused_while_a_device_writes_to_it(arena: Arena, late: LateCopies) -> None:
    captured = capture([torch.ones(3, 4).t()])
    slot = take_for(arena, captured)
    copy_captured(captured, slot, threads=2)
    slot.release()
    assert not late.left


def test_the_order_on_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def log(what: str, result: Any = None) -> Callable[..., Any]:
        def called(*_: object) -> Any:
            events.append(what)
            return result

        return called

    class Side:
        def __enter__(self) -> None:
            events.append("on side")

        def __exit__(self, *_: object) -> None:
            events.append("off side")

    event = SimpleNamespace(synchronize=log("arrived"))
    side = SimpleNamespace(wait_stream=log("side waits"), record_event=log("recorded", event), synchronize=log("side is done"))
    current = SimpleNamespace(wait_event=log("current waits"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: Side())
    monkeypatch.setattr(torch.Tensor, "record_stream", log("held"))
    found, target = torch.tensor([1 + 2j, 3j]).conj(), torch.zeros(2, dtype=torch.complex64)
    streams = SideStreams()
    arrival = streams.start([DeviceCopy(found, target)])
    assert events == ["side waits", "on side", "held", "off side", "recorded"]
    assert target.tolist() == [1 - 2j, -3j]
    arrival.hold_streams()
    assert events.pop() == "current waits"
    arrival.wait()
    arrival.wait()
    assert events[5:] == ["arrived"]
    with pytest.raises(RuntimeError):
        streams.start([DeviceCopy(found, target[:1].view(1, 1, 1).expand(2, 2, 2))])
    assert events[-1] == "side is done"


def held(slot: Slot) -> Any:
    assert slot.memory is not None
    return slot.memory
