"""Memory order: what is dense comes back in the order of dims in which it lay; stored bytes are row-major in any case."""

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.layout import Layout, TensorSpec, decode_layout
from tensorstore_ck.format.sealed import seal, unseal
from tensorstore_ck.state import LazySnapshot, capture, restore
from tests.state.fake import FakeContent, round_trip, stored

SHAPES = [(3, 4), (2, 3, 4), (4, 3, 1, 1), (1, 3, 5, 1), (2, 3, 4, 5), (8, 1, 2, 2), (1, 1, 1, 1)]


def permuted(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """Dense, with the dims in this order in memory."""
    in_memory = torch.arange(float(np.prod(shape))).reshape([shape[dim] for dim in order])
    return in_memory.permute(np.argsort(order).tolist()).detach().clone(memory_format=torch.preserve_format)


def test_every_order() -> None:
    for shape in SHAPES:
        for order in permutations(range(len(shape))):
            whole = permuted(shape, order)
            content = stored([whole, whole.numpy().copy(order="K")])
            tensor, array = restore(content)
            assert tensor.stride() == whole.stride(), (shape, order)
            assert torch.equal(tensor, whole)
            assert np.array_equal(array, whole.numpy())
            assert array.flags.f_contiguous == whole.numpy().flags.f_contiguous
            assert b"".join(bytes(source.read(0, source.size_bytes)) for source in capture(whole).sources) == whole.numpy().tobytes()


@pytest.mark.parametrize(
    "whole",
    [
        torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.zeros(2, 3, 4, 5, 5).to(memory_format=torch.channels_last_3d),
        torch.nn.Parameter(torch.zeros(4, 3).t()),
        torch.zeros(4, 3, dtype=torch.float8_e4m3fn).t(),
        torch.zeros(4, 3, dtype=torch.complex64).t().conj(),
        torch.zeros(8, 3, 1, 1).to(memory_format=torch.channels_last),
    ],
    ids=["2d", "3d", "parameter", "float8", "conj", "1x1"],
)
def test_kinds(whole: torch.Tensor) -> None:
    found = round_trip({"x": whole})["x"]
    assert (type(found), found.stride(), found.dtype) == (type(whole), whole.stride(), whole.dtype)


def test_complex128_after_bytes(tmp_path: Path) -> None:
    """Stored after some bytes, it is read at addresses at which torch's copies of complex128 crash the process."""
    saved = {f"{size} {name}": value for size in range(1, 9) for name, value in after_bytes(size).items()}
    with tsck.open(str(tmp_path / "store"), create=True) as store:
        store.put_snapshot(saved, ref="main")
        found, into = store.checkout("main"), {name: torch.zeros_like(value) for name, value in saved.items()}
        conjugated = {name: value if value.dtype == torch.uint8 else value.conj() for name, value in into.items()}
        store.checkout("main", into=conjugated)
        assert all(torch.equal(conjugated[name], value) and torch.equal(found[name], value) for name, value in saved.items())
        store.checkout("main", into=into)
        assert all(torch.equal(into[name], value) and found[name].stride() == value.stride() for name, value in saved.items())


def after_bytes(size: int) -> dict[str, torch.Tensor]:
    transposed = torch.arange(60.0).to(torch.complex128).reshape(4, 3, 5).transpose(0, 1) * (1 + 2j)
    return {"bytes": torch.arange(size, dtype=torch.uint8), "transposed": transposed}


def test_converted_and_shared_and_on_meta() -> None:
    whole = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    assert round_trip({"x": whole}, dtype=torch.float64)["x"].stride() == whole.stride()
    memory = torch.randn(4 * 75 + 16)
    one, two = memory[:300].as_strided((4, 3, 5, 5), whole.stride()), memory[300:]
    found = round_trip({"one": one, "two": two})
    assert found["one"].stride() == whole.stride()
    assert torch.equal(found["one"], one)
    assert found["one"].untyped_storage().data_ptr() == found["two"].untyped_storage().data_ptr()
    for target in (torch.empty_like(whole, device="meta"), torch.empty(4, 3, 5, 5, device="meta")):
        into = {"x": target}
        round_trip({"x": whole}, into=into)
        assert into["x"].stride() == target.stride(), "the target's order"
        assert torch.equal(into["x"], whole)


def test_read_lazily() -> None:
    whole = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    found = LazySnapshot(stored({"x": whole}))["x"]
    for index in (..., 2, slice(1, 3), (2, 1)):
        assert torch.equal(found[index], whole[index])
        assert round_trip(whole[index]).stride() == found[index].stride()


def test_row_major_layouts_have_no_such_key_and_the_bytes_are_the_same(tmp_path: Path) -> None:
    whole = torch.randn(64, 3, 50, 50)
    other = whole.to(memory_format=torch.channels_last)
    assert "orders" not in unseal("layout", capture({"x": whole}).layout.encoded, "it")
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache", create=True) as store:
        one, two = store.put_snapshot({"x": whole}, ref="one"), store.put_snapshot({"x": other}, ref="two")
        assert one.root != two.root
        assert store.checkout("one")["x"].stride() == whole.stride()
        assert store.checkout("two")["x"].stride() == other.stride()
    assert sum(path.stat().st_size for path in (tmp_path / "store" / "packs").rglob("*") if path.is_file()) < 1.1 * whole.nbytes


@pytest.mark.parametrize(
    "orders",
    [
        [[b"\0\0", b"\0\0\0\0"]],
        [[b"\1\0", b"\1\0\0\0"]],
        [[b"\1\0\2", b"\0\0\0\0"]],
        [[b"\1\0", b"\0\0\0\0"], [b"\1\0", b"\0\0\0\0"]],
        [["\1\0", b"\0\0\0\0"]],
        [[b"\1\0", b"\0\0\0"]],
        [[b"\0", b"\0\0\0\0"]],
        {},
    ],
)
def test_malformed(orders: Any) -> None:
    body = unseal("layout", Layout([TensorSpec("x", "float32", 4, (3, 2))], 0).encoded, "it")
    with pytest.raises(CorruptObjectError, match="not a valid layout"):
        decode_layout(seal("layout", {**body, "orders": orders}), "it")


def test_a_view_into_it() -> None:
    """Its strides are over row-major memory: such a layout has no meaning."""
    base = torch.arange(6.0).view(3, 2)
    captured = capture([base, base[1:]])
    forged = Layout([captured.layout.tensors[0]._replace(order=(1, 0))], captured.layout.tree)
    with pytest.raises(CorruptObjectError, match="does not lie within"):
        restore(FakeContent(captured._replace(layout=forged)))
