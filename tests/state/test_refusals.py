"""What cannot be stored is refused with its path and with advice; `inspect_state` finds all of it at once."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from tensorstore_ck.common.free_space import Space
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.values import MAX_NESTING
from tensorstore_ck.state import capture, check_state
from tensorstore_ck.state.check import inspect_state
from tests.state.fake import round_trip


class Mode(IntEnum):
    TRAIN = 1


class MyDict(dict):  # type: ignore[type-arg]
    pass


class MyTensor(torch.Tensor):
    pass


def with_attributes() -> OrderedDict[str, int]:
    ordered: OrderedDict[str, int] = OrderedDict(a=1)
    ordered.extra = 1  # type: ignore[attr-defined]
    return ordered


def freed() -> torch.Tensor:
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


def quantized() -> torch.Tensor:
    return torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.quint8)


def misaligned() -> list[torch.Tensor]:
    raw = np.zeros(64, np.uint8)
    return [torch.from_numpy(raw), torch.from_numpy(raw[1:9].view("f4"))]


def misaligned_apart() -> list[Any]:
    raw = np.zeros(64, np.uint8)
    return [raw[:2], torch.from_numpy(raw[5:9].view("f4"))]


def string_dtype() -> Any:
    return np.array(["a"], np.dtypes.StringDType())


Local = namedtuple("SomethingElse", ["x"])  # type: ignore[name-match]

REFUSED: list[tuple[str, Any, str]] = [
    ("str subclass", lambda: torch.__version__, r"convert it with str\(\.\.\.\)"),
    ("slow keys", lambda: {number << 32: 1 for number in range(40_000)}, "quadratic time; use other keys"),
    ("slow elements", lambda: {((1 << 61) - 1) * number for number in range(900)}, "quadratic time; use other elements"),
    ("dict subclass", lambda: MyDict(a=1), r"convert it with dict\(\.\.\.\)"),
    ("UserDict", lambda: UserDict(a=1), "leave it out"),
    ("mapping proxy", lambda: MappingProxyType({}), "leave it out"),
    ("function", lambda: freed, "leave it out"),
    ("class", lambda: MyDict, "leave it out"),
    ("ordered attributes", with_attributes, r"attributes \['extra'\]"),
    ("lambda factory", lambda: defaultdict(lambda: 1), "a factory can be OrderedDict, bool"),
    ("lost namedtuple", lambda: Local(1), "define it at the top level"),
    ("torch result", lambda: torch.ones(2).max(0), "torch.return_types.max"),
    ("module", lambda: torch.nn.Linear(1, 1), r"store its \.state_dict\(\)"),
    ("optimizer", lambda: torch.optim.SGD([torch.ones(1, requires_grad=True)]), r"store its \.state_dict\(\)"),
    ("generator", torch.Generator, r"store \.get_state\(\)"),
    ("numpy generator", np.random.default_rng, r"store \.bit_generator\.state"),
    ("storage", lambda: torch.ones(1).untyped_storage(), "store a tensor over it"),
    ("sparse", lambda: torch.eye(2).to_sparse(), r"torch\.sparse_coo; store \.to_dense\(\)"),
    ("sparse csr", lambda: torch.eye(2).to_sparse_csr(), r"torch\.sparse_csr; store \.to_dense\(\)"),
    ("quantized", quantized, r"\.dequantize\(\)"),
    ("nested", lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), r"\.values\(\)"),
    ("nested strided", lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.strided), r"\.values\(\)"),
    ("mkldnn", lambda: torch.ones(2).to_mkldnn(), r"torch\._mkldnn; store \.to_dense\(\)"),
    ("meta", lambda: torch.ones(2, device="meta"), "materialize it"),
    ("fake", fake, "FakeTensorMode"),
    ("tensor subclass", lambda: torch.ones(2).as_subclass(MyTensor), "tensor subclass"),
    ("uninitialized", torch.nn.parameter.UninitializedParameter, "run a batch through the module first"),
    ("freed", freed, "its memory was freed"),
    ("object array", lambda: np.array([None]), "numpy dtype object"),
    ("structured array", lambda: np.zeros(2, "i4,f4"), "has no stored form"),
    ("string array", string_dtype, "has no stored form"),
    ("wide array", lambda: np.zeros(2, "U2000"), "has no stored form"),
    ("masked array", lambda: np.ma.array([1], mask=[True]), r"\.data and \.mask"),
    ("matrix", lambda: np.asmatrix([[1]]), "numpy subclass"),
    ("void scalar", lambda: np.void(b"x"), "numpy.void"),
    ("misaligned", misaligned, r"\.clone\(\)"),
    ("misaligned apart", misaligned_apart, r"\.clone\(\)"),
    ("shared conjugate", lambda: (z := torch.ones(2, dtype=torch.complex64), z.conj()), r"\.clone\(\)"),
    ("shared conjugate first", lambda: ((z := torch.ones(2, dtype=torch.complex64)).conj(), z), r"\.clone\(\)"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:.*quantized:UserWarning", "ignore:the matrix subclass")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("make", "advice"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused(make: Any, advice: str) -> None:
    value = make()
    with pytest.raises(UnsupportedValueError, match=advice) as caught:
        capture({"model": [value]})
    assert "model.0" in str(caught.value)
    assert caught.value.object_id.startswith("model.0")
    (problem,) = inspect_state({"ok": torch.ones(1), "model": [value], "fine": 2})[0]
    assert problem.message == str(caught.value)


def test_dtensor() -> None:
    class DTensor(torch.Tensor):
        pass

    with pytest.raises(UnsupportedValueError, match=r"it is a DTensor; pass group= "):
        capture([torch.ones(1).as_subclass(DTensor)])


@pytest.mark.parametrize("key", [Mode.TRAIN, Path(), (1, Mode.TRAIN), torch.nn.Linear])
def test_refused_keys(key: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"cannot store a\..*\(a dict key\)"):
        capture({"a": {key: 1}})


def test_a_state_that_contains_itself() -> None:
    state: dict[str, Any] = {"a": []}
    state["a"].append(state)
    with pytest.raises(UnsupportedValueError, match=f"nested deeper than {MAX_NESTING} levels.*contain itself"):
        capture(state)
    assert len(inspect_state(state)[0]) == 1


def test_depth_that_works_and_depth_that_does_not() -> None:
    state: Any = torch.ones(1)
    for _ in range(MAX_NESTING):
        state = [state]
    assert round_trip(state) == state
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        capture([state])


def test_tensors_without_memory() -> None:
    def inside(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedValueError, match="cannot store x: torch cannot reach its memory"):
            capture({"x": row})
        return row

    torch.vmap(inside)(torch.ones(2, 3))


def test_all_problems_are_found_in_order() -> None:
    state = {"a": freed, "b": [1, MyDict, {"c": torch.ones(1, device="meta")}], "d": {Path(): 1}}
    assert [problem.path for problem in inspect_state(state)[0]] == ["a", "b.1", "b.2.c", "d.PosixPath('.') (a dict key)"]
    assert inspect_state({"a": 1})[0] == []


class Writer:
    def __init__(self, backend: "Backend") -> None:
        self.backend = backend

    def append(self, data: Any) -> int:
        self.backend.written += sum(map(len, data))
        return 0

    def close(self) -> None:
        if self.backend.broken:
            raise OSError("no")

    def abort(self) -> None:
        self.backend.aborted = True


class Backend:
    def __init__(self, free: int | None, broken: bool = False) -> None:
        self.free, self.written, self.deleted, self.broken, self.aborted = free, 0, [""], broken, False

    def open_writer(self, name: str) -> Writer:
        self.name = name
        return Writer(self)

    def space(self) -> Space | None:
        return None if self.free is None else Space(self.free, 100_000)

    def delete(self, names: list[str]) -> None:
        self.deleted = names


def test_check_state() -> None:
    backend: Any = Backend(10_000)
    found = check_state({"x": torch.zeros(1000), "name": "gpt"}, backend)
    assert (found.tensor_count, found.tensor_bytes, found.free_bytes, found.problems, found.ok) == (1, 4000, 10_000, (), True)
    assert 0 < found.value_bytes < 2000
    assert found.seconds > 0
    assert backend.written == 4000
    assert backend.deleted == [backend.name]
    assert not check_state({"x": torch.zeros(10_000)}, backend).ok
    bad: Any = Backend(None)
    assert not check_state({"x": freed}, bad).ok
    assert bad.written == 0


def test_check_state_cleans_up_after_a_failed_write() -> None:
    backend: Any = Backend(10_000, broken=True)
    with pytest.raises(OSError, match="no"):
        check_state([torch.zeros(10)], backend)
    assert backend.aborted
