"""Boxes of tensors in one process: what can be one, what is stored of them, and what they are filled with."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import InvalidOptionError, MismatchError, UnsupportedValueError
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.state import capture, restore
from tensorstore_ck.state.boxes import coverage_error
from tensorstore_ck.state.sharded_tensors import SpreadDescriber
from tests.session.group.boxed import boxes_of
from tests.state.fake import stored

FULL = torch.arange(48.0).view(6, 8)


def protocol(local: torch.Tensor, shape: Any, global_offsets: Any, local_offsets: Any, sizes: Any) -> Any:
    """A plain tensor with the attributes of torch 2.15's ``CheckpointableTensor``."""
    tensor: Any = local
    tensor.global_shape, tensor.global_offsets, tensor.local_offsets, tensor.local_sizes = shape, global_offsets, local_offsets, sizes
    return tensor


def three_boxes(full: torch.Tensor) -> tsck.Boxes:
    """All of it, in another order, with other strides, and one that is empty."""
    cut = [((2, 5), full[2:, 5:].t().contiguous().t()), ((0, 0), full[:2].clone()), ((2, 0), full[2:, :5].clone()), ((6, 0), full[6:])]
    return tsck.Boxes([tsck.Box(local, tuple(full.shape), offsets) for offsets, local in cut])


def one_buffer(full: torch.Tensor) -> Any:
    """All of it, in a buffer with a gap."""
    buffer = torch.cat((full[4:], torch.zeros(1, 8), full[:4]))
    return protocol(buffer, (6, 8), ((0, 0), (4, 0)), ((3, 0), (0, 0)), ((4, 8), (2, 8)))


def half(full: torch.Tensor) -> tsck.Box:
    return tsck.Box(full[3:].clone(), (6, 8), (3, 0))


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one box": lambda full: tsck.Box(full.clone(), (6, 8), (0, 0)),
    "a parameter": lambda full: tsck.Box(torch.nn.Parameter(full.clone()), (6, 8), (0, 0)),
    "three boxes": three_boxes,
    "a buffer": one_buffer,
    "a parameter that is a buffer": lambda full: protocol(torch.nn.Parameter(full.clone()), (6, 8), ((0, 0),), ((0, 0),), ((6, 8),)),
    "a subclass that is a buffer": lambda full: protocol(full.clone().as_subclass(Named), (6, 8), [[0, 0]], [[0, 0]], [[6, 8]]),
}


class Named(torch.Tensor):
    """A plain tensor of another name."""


def memory_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, tsck.Boxes):
        return [box.local for box in value.boxes]
    return [value.local] if isinstance(value, tsck.Box | tsck.FlatShard) else boxes_of(value)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache", create=True) as opened:
        yield opened


@pytest.mark.parametrize(
    ("way", "how"), [*((way, "waited for") for way in WAYS), ("three boxes", "async"), ("a buffer", "async"), ("three boxes", "staged")]
)
def test_a_whole_tensor_in_boxes(store: tsck.Store, tmp_path: Path, way: str, how: str) -> None:
    state = {"w": WAYS[way](FULL), "same": FULL.clone(), "step": 3}
    assert store.check(state).ok
    if how == "waited for":
        root = store.put_snapshot(state, ref="job", step=3).root
    else:
        staging = tmp_path / "staging" if how == "staged" else None
        with tsck.open(tmp_path / "store", cache_dir=tmp_path / "other", staging=staging) as other:
            pending = other.put_snapshot_async(state, ref="job", step=3)
            for local in memory_of(state["w"]):
                local.detach().zero_()
            root = pending.wait().root
    found = store.checkout(root)
    assert found["w"].tolist() == FULL.tolist()
    assert isinstance(found["w"], torch.nn.Parameter) == found["w"].requires_grad == ("parameter" in way)
    for name, make in WAYS.items():
        into = {"w": make(torch.zeros(6, 8)), "same": torch.zeros(6, 8), "step": 0}
        target = into["w"]
        assert store.checkout(root, into=into)["w"] is target
        expected = memory_of(make(FULL))
        assert [local.tolist() for local in memory_of(target)] == [local.tolist() for local in expected], name
        if name == "a buffer":
            assert target[2].tolist() == [0.0] * 8  # the gap


def test_part_of_a_tensor_is_filled_and_not_stored(store: tsck.Store, tmp_path: Path) -> None:
    store.put_snapshot({"w": three_boxes(FULL)}, ref="job", step=1)
    into = {"w": half(torch.zeros(6, 8))}
    assert store.checkout("job", into=into)["w"].local.tolist() == FULL[3:].tolist()
    flat = {"w": tsck.FlatShard(torch.zeros(10), (6, 8), 7)}
    assert store.checkout("job", into=flat)["w"].local.tolist() == list(range(7, 17))
    tsck.export_snapshot(store, "job", tmp_path / "exported.pt", format="torch")
    assert torch.load(tmp_path / "exported.pt")["w"].tolist() == FULL.tolist()
    with pytest.raises(UnsupportedValueError, match=r"cannot store w: .*\[6, 8\] \(24 elements are missing\).* pass group="):
        store.put_snapshot(into, ref="job", step=2)
    assert [problem.path for problem in store.check(into).problems] == ["w"]
    twice = {"w": tsck.Boxes([half(FULL), tsck.Box(FULL, (6, 8), (0, 0))])}
    with pytest.raises(UnsupportedValueError, match="pieces overlap"):
        store.put_snapshot(twice, ref="job", step=2)


def test_whether_boxes_are_a_whole_tensor() -> None:
    """As counting the boxes of each element says; and of 100,000: to compare them in pairs takes minutes."""
    chance, whole = random.Random(1), 0
    for _ in range(600):
        shape = tuple(chance.randrange(1, 4) for _ in range(chance.randrange(3)))
        starts = [tuple(map(chance.randrange, shape)) for _ in range(chance.randrange(5))]
        sizes = [tuple(chance.randrange(1, end - at + 1) for end, at in zip(shape, start, strict=True)) for start in starts]
        count = torch.zeros(shape, dtype=torch.int32)
        for start, size in zip(starts, sizes, strict=True):
            count[tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))] += 1
        is_whole = bool((count == 1).all())
        whole += is_whole
        assert (not coverage_error(shape, list(map(BoxBounds, starts, sizes)))) == is_whole, (shape, starts, sizes)
    assert whole > 40
    assert not coverage_error((1, 100_000), [BoxBounds((0, at), (1, 1)) for at in range(100_000)])


def test_what_does_not_fit_is_not_filled(store: tsck.Store) -> None:
    store.put_snapshot({"w": FULL}, ref="job", step=1)
    for target, match in [
        (tsck.Box(torch.zeros(3, 8), (7, 8), (0, 0)), r"w: shape \[7, 8\] here, \[6, 8\] in the snapshot"),
        (tsck.Box(torch.zeros(3, 8, dtype=torch.int32), (6, 8), (0, 0)), r"w: int32 here, float32 in"),
        (tsck.Box(torch.zeros(1, 8).expand(3, 8), (6, 8), (0, 0)), r"w: the tensor here is expanded"),
    ]:
        with pytest.raises(MismatchError, match=match):
            store.checkout("job", into={"w": target})


def test_boxes_in_a_list_are_several_tensors(store: tsck.Store) -> None:
    store.put_snapshot({"w": [WAYS["one box"](FULL), three_boxes(FULL + 1)]}, ref="job", step=1)
    into = {"w": [half(torch.zeros(6, 8)), half(torch.zeros(6, 8))]}
    assert [box.local[0, 0].item() for box in store.checkout("job", into=into)["w"]] == [24.0, 25.0]
    with pytest.raises(MismatchError):
        store.checkout("job", into={"w": [half(torch.zeros(6, 8))] * 3})


def test_memory_that_was_freed_is_not_read() -> None:
    local = torch.ones(64, 64)
    box = tsck.Box(local, (128, 64), (0, 0))
    local.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match="cannot store or fill w: it has no plain memory: its memory was freed"):
        capture({"w": box}, SpreadDescriber({0: 0}, 0))


def test_a_box() -> None:
    box = tsck.Box(torch.ones(2, 3).t(), torch.Size((4, 5)), [1, 3])  # type: ignore[arg-type]
    assert (type(box.global_shape), box.global_shape, box.offsets) == (tuple, (4, 5), (1, 3))
    tsck.Box(torch.ones(0, 5), (4, 5), (4, 0))
    tsck.Box(torch.tensor(1.0), (), ())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: tsck.Box([1.0], (4,), (0,)), "local is a list; pass a plain"),  # type: ignore[arg-type]
        (lambda: tsck.Box(FULL.as_subclass(Named), (6, 8), (0, 0)), "local is a Named; pass a plain"),
        (lambda: tsck.Box(FULL.to_sparse(), (6, 8), (0, 0)), r"local is no dense tensor \(torch.sparse_coo\)"),
        (lambda: tsck.Box(FULL.to("meta"), (6, 8), (0, 0)), "local is a meta tensor, which has no data"),
        (lambda: tsck.Box(FULL, (6, 8), (0.0, 0)), "must be whole numbers"),  # type: ignore[arg-type]
        (lambda: tsck.Box(FULL, 48, (0, 0)), "must be whole numbers"),  # type: ignore[arg-type]
        (lambda: tsck.Box(FULL, (2, 6, 8), (0, 0, 0)), r"local has 2 dims, global_shape 3, offsets 3: .*local.unsqueeze\(0\)"),
        (lambda: tsck.Box(FULL, (6, 8), (0,)), "local has 2 dims, global_shape 2, offsets 1"),
        (lambda: tsck.Box(FULL, (6, 8), (1, 0)), r"a box of shape \(6, 8\) at \(1, 0\) does not lie within a tensor of shape \(6, 8\)"),
        (lambda: tsck.Box(FULL, (7, 8), (-1, 0)), r"at \(-1, 0\) does not lie within"),
        (lambda: tsck.Box(FULL[:0], (6, 8), (7, 0)), r"at \(7, 0\) does not lie within"),
        (lambda: tsck.Boxes([]), "there are none; pass one Box or more"),
        (lambda: tsck.Boxes([FULL]), "one is a Tensor; pass one Box"),  # type: ignore[list-item]
        (
            lambda: tsck.Boxes([half(FULL), tsck.Box(FULL, (7, 8), (0, 0))]),
            r"one has global shape \(6, 8\), .* another global shape \(7, 8\)",
        ),
        (lambda: tsck.Boxes([half(FULL), tsck.Box(FULL.double(), (6, 8), (0, 0))]), r"torch.float32, .* torch.float64"),
    ],
)
def test_boxes_that_cannot_be(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(InvalidOptionError, match=match):
        make()


@pytest.mark.parametrize(
    ("told", "match"),
    [
        (((9, 8), ((0, 0),), ((0, 0),), ((7, 8),)), r"sizes \(7, 8\) at \(0, 0\) do not lie within the local tensor of shape \(6, 8\)"),
        (((9, 8), ((0, 0),), ((-1, 0),), ((2, 8),)), r"at \(-1, 0\) do not lie within the local"),
        (((9, 8), ((0, 0),), ((0,),), ((2, 8),)), r"sizes \(2, 8\) at \(0,\) do not lie"),
        (((9, 8), ((8, 0),), ((0, 0),), ((2, 8),)), r"at \(8, 0\) does not lie within a tensor of shape \(9, 8\)"),
        (((9, 8, 1), ((0, 0),), ((0, 0),), ((2, 8),)), "local has 2 dims, global_shape 3"),
        (((9, 8), ((0, 0), (3, 0)), ((0, 0),), ((2, 8),)), r"zip\(\) argument"),
        (((9, 8), None, ((0, 0),), ((2, 8),)), "None"),
    ],
)
def test_a_tensor_with_impossible_boxes(told: Any, match: str) -> None:
    state = {"w": protocol(FULL.clone(), *told)}
    with pytest.raises(UnsupportedValueError, match=f"^w is a tensor that names boxes which it cannot hold .*{match}.*local_sizes"):
        capture(state)
    with pytest.raises(UnsupportedValueError, match=r"^w is a tensor that names boxes"):
        restore(stored({"w": FULL}), into=state)


def test_a_tensor_with_some_of_the_attributes_is_an_ordinary_one() -> None:
    tensor: Any = FULL.clone()
    tensor.global_shape = (12, 8)
    assert restore(stored({"a": FULL, "w": tensor}))["w"].tolist() == FULL.tolist()
