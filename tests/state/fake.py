"""A `Content` in memory, over what `capture` made: the bytes go through msgpack and the layout's own encoding, as in a store."""

import math
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from tensorstore_ck.engine.interfaces import ByteTarget, CapturedState, WantedBox
from tensorstore_ck.engine.read.block_reader import deliver
from tensorstore_ck.format.layout import decode_layout
from tensorstore_ck.format.sealed import pack_body, unpack_body
from tensorstore_ck.state import capture, restore
from tensorstore_ck.state.memory_order import order_of
from tensorstore_ck.state.plain_memory import is_plain


class FakeContent:
    def __init__(self, captured: CapturedState, block_items: int = 1000) -> None:
        self.layout = decode_layout(captured.layout.encoded, "a layout")
        self.values = unpack_body(memoryview(pack_body(list(captured.values))), "values")
        self.blobs = list(captured.blobs)
        specs = captured.layout.tensors
        self.tensors = [bytes(source.read(0, spec.size_bytes)) for spec, source in zip(specs, captured.sources, strict=True)]
        self.block_items = block_items
        self.reads: list[int] = []
        self.ranges: list[tuple[int, int, int]] = []
        self.fail: Exception | None = None

    def blob(self, index: int) -> bytes:
        return self.blobs[index]

    def read(self, targets: Mapping[int, ByteTarget]) -> None:
        for number, target in targets.items():
            self.reads.append(number)
            data = memoryview(self.tensors[number])
            memory = target.memory()
            if memory is not None:
                assert len(memory) == len(data)
                memory[:] = data
            else:
                step = self.block_items * self.layout.tensors[number].item_bytes
                for start in reversed(range(0, len(data), step)):
                    target.write(start, data[start : start + step])
            if self.fail is not None:
                raise self.fail

    def read_boxes(self, wanted: Iterable[WantedBox]) -> None:
        for tensor, box, target in wanted:
            spec = self.layout.tensors[tensor]
            items = np.frombuffer(self.tensors[tensor], f"V{spec.item_bytes}").reshape(spec.shape)
            cut = items[tuple(slice(start, start + size) for start, size in zip(*box, strict=True))]
            deliver(target, 0, memoryview(cut.tobytes()))

    def read_range(self, tensor: int, start: int, stop: int) -> bytearray:
        self.ranges.append((tensor, start, stop))
        return bytearray(self.tensors[tensor][start:stop])


def stored(state: object) -> FakeContent:
    return FakeContent(capture(state))


def round_trip(state: object, **options: Any) -> Any:
    return restore(stored(state), **options)


def bits(found: Any) -> bytes:
    """The bytes of a tensor or array, row-major."""
    if isinstance(found, np.ndarray):
        return found.tobytes()
    found = found.detach().resolve_conj().resolve_neg()
    if found.numel() == 0:
        return b""
    size = found.dtype.itemsize
    if size <= 8:
        found = found.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    return bytes(found.contiguous().numpy().tobytes())


def assert_same(a: Any, b: Any, path: str = "state", *, in_order: bool = True) -> None:
    """Same types, same order, same bits, and with `in_order` the same memory order; object identity aside."""
    assert type(a) is type(b), (path, type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert a.shape == b.shape, path
        assert a.requires_grad == b.requires_grad, path
        assert not in_order or not is_plain(a) or order_of(a) == order_of(b), path
        assert bits(a) == bits(b), path
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype, path
        assert a.dtype.str == b.dtype.str, path
        assert not in_order or order_of(a) == order_of(b), path
        assert a.shape == b.shape, path
        assert bits(a) == bits(b), path
    elif isinstance(a, dict):
        assert len(a) == len(b), path
        for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True):
            assert_same(ka, kb, f"{path} key {ka!r}", in_order=in_order)
            assert_same(va, vb, f"{path}.{ka!r}", in_order=in_order)
        if isinstance(a, OrderedDict):
            assert_same(vars(a), vars(b), f"{path} attributes", in_order=in_order)
        if isinstance(a, defaultdict):
            assert a.default_factory is b.default_factory, path
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}.{number}", in_order=in_order)
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b), path
    elif isinstance(a, complex):
        assert struct.pack("<dd", a.real, a.imag) == struct.pack("<dd", b.real, b.imag), path
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype, path
        assert a.tobytes() == b.tobytes(), path
    elif isinstance(a, set | frozenset):
        assert sorted(map(_text, a)) == sorted(map(_text, b)), path
    else:
        assert a == b, path


def _text(value: object) -> str:
    if isinstance(value, frozenset):
        return "frozenset" + str(sorted(map(_text, value)))
    if type(value) is tuple:
        return "(" + ", ".join(map(_text, value)) + ")"
    if isinstance(value, float):
        return f"{type(value)} {struct.pack('<d', value).hex()} {math.isnan(value)}"
    return f"{type(value)} {value!r}"
