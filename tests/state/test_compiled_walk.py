"""A state is taken apart the same whether the kernel asks torch about its tensors or Python does, whatever tensors it has."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.codec import compiled
from tensorstore_ck.state import capture, tensor_table
from tensorstore_ck.state.registered_types import DTYPE_NAMES
from tensorstore_ck.state.tensor_table import ByteSources, TensorTable
from tests.effort import effort

pytestmark = [
    pytest.mark.skipif(not compiled.HAS_KERNEL, reason="no compiler was there when this was installed"),
    pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch lacks DLPack's table of functions"),
]

DTYPES = sorted(DTYPE_NAMES, key=str)
STORAGE_BYTES = 1 << 12
Make = Callable[[random.Random, torch.Tensor], Any]


class Subclass(torch.Tensor):
    pass


def of_some_dtype(rng: random.Random, flat: torch.Tensor) -> torch.Tensor:
    return flat.view(rng.choice(DTYPES))


def some_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 18))))[: rng.choice((2, 5, 18))]


def strided(rng: random.Random, flat: torch.Tensor) -> torch.Tensor:
    """Anything that `as_strided` makes: odd strides of dims of extent 1, expanded, overlapping, transposed, at some offset."""
    typed, shape = of_some_dtype(rng, flat), some_shape(rng)
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    for dim, extent in enumerate(shape):
        if extent == 1 and rng.random() < 0.5:
            strides[dim] = rng.choice((0, 1, 7))
    if rng.random() < 0.3:
        rng.shuffle(strides)
    if rng.random() < 0.1:
        strides = [0] * len(shape)
    reach = sum(max(extent - 1, 0) * stride for extent, stride in zip(shape, strides, strict=True))
    room = typed.numel() - 1 - reach
    return typed.as_strided(shape, strides, rng.randint(0, room)) if room >= 0 else typed


def row_major(rng: random.Random, flat: torch.Tensor) -> torch.Tensor:
    typed = of_some_dtype(rng, flat)
    start = rng.randint(0, typed.numel())
    return typed[start : start + rng.choice((0, 1, 5, 64))]


def parameter(rng: random.Random, _: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(torch.rand(rng.choice((1, 3)), rng.choice((1, 4))), requires_grad=rng.random() < 0.5)


def shrunk(size_bytes: int) -> torch.Tensor:
    """A tensor of 64 bytes whose memory was resized."""
    tensor = torch.rand(16)
    tensor.untyped_storage().resize_(size_bytes)
    return tensor


def marked(_: random.Random, flat: torch.Tensor) -> torch.Tensor:
    tensor = flat[:8].clone()
    for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        setattr(tensor, name, (8,) if name == "global_shape" else ((8,),) if name == "local_sizes" else ((0,),))
    return tensor


def another_storage(rng: random.Random, flat: torch.Tensor) -> torch.Tensor:
    """One of several over the same memory."""
    start = rng.choice((0, 0, 64, 1000))
    return torch.from_numpy(flat.numpy()[start:])[: rng.choice((4, 100, 1000))]


def misaligned(_: random.Random, __: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(65), dtype=torch.float32, count=16, offset=1)


KINDS: dict[str, Make] = {
    "row_major": row_major,
    "strided": strided,
    "a tensor of its own": lambda rng, _: torch.rand(some_shape(rng)),
    "parameter": parameter,
    "grad": lambda _, flat: flat[:8].view(torch.float32).clone().requires_grad_(),
    "conjugate": lambda _, flat: flat[:16].view(torch.complex64).conj(),
    "negative": lambda _, flat: flat[:16].view(torch.complex64).conj().imag,
    "negated": lambda _, flat: torch._neg_view(flat[:16].view(torch.float32)),
    "real": lambda _, flat: flat[:16].view(torch.complex64).real,
    "channels_last": lambda _, __: torch.rand(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "inference": lambda _, __: torch.inference_mode()(torch.rand)(3),
    "marked": marked,
    "another storage": another_storage,
    "misaligned": misaligned,
    "array": lambda _, flat: flat.numpy()[8:24].view(np.float32),
    "number": lambda rng, _: rng.random(),
    "nested": lambda _, flat: {"a": flat[:4], "b": [flat[2:6], 1]},
}
REFUSED: dict[str, Make] = {
    "subclass": lambda _, flat: flat[:8].as_subclass(Subclass),
    "sparse": lambda _, __: torch.eye(3).to_sparse(),
    "sparse_csr": lambda _, __: torch.eye(3).to_sparse_csr(),
    "nested tensor": lambda _, __: torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]),
    "meta": lambda _, __: torch.empty(3, device="meta"),
    "mkldnn": lambda _, __: torch.rand(3, 3).to_mkldnn(),
    "quantized": lambda _, __: torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8),
    "functional": lambda _, __: torch._to_functional_tensor(torch.rand(3)),
    "freed": lambda _, __: shrunk(0),
    "partly freed": lambda _, __: shrunk(60),
}


def outcome(state: object) -> object:
    """What a walk finds, or refuses, with the bytes and the memory of each tensor."""
    try:
        captured: CapturedState = capture(state)
    except UnsupportedValueError as exc:
        return str(exc)
    sources = captured.sources
    assert isinstance(sources, ByteSources)
    places = [(int(sources.addresses[number]) if source.size_bytes else 0, type(source)) for number, source in enumerate(sources)]
    content = [bytes(source.read(0, source.size_bytes)) for source in sources]
    return list(captured.layout.tensors), captured.layout.encoded, captured.values, list(captured.blobs), places, content


def both(state: object, monkeypatch: pytest.MonkeyPatch) -> tuple[object, object]:
    by_kernel = outcome(state)
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "HAS_KERNEL", False)
        return by_kernel, outcome(state)


class CountingKernel:
    """Counts the tensors that the kernel adds."""

    def __init__(self) -> None:
        self.added = 0
        self._kernel = compiled.kernel

    def add_tensors(self, rules: tuple[Any, ...], columns: tuple[Any, ...], items: list[Any], start: int) -> int:
        stop = self._kernel.add_tensors(rules, columns, items, start)
        self.added += stop - start
        return stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> CountingKernel:
    counting = CountingKernel()
    monkeypatch.setattr(compiled, "kernel", counting)
    return counting


def test_random_states(kernel: CountingKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, seeds = 0, range(effort(400, 20_000))
    for seed in seeds:
        rng = random.Random(seed)
        flat = torch.arange(STORAGE_BYTES, dtype=torch.int64).to(torch.uint8)
        made = [KINDS[rng.choice([*KINDS])](rng, rng.choice((flat, flat.clone()))) for _ in range(rng.randint(1, 12))]
        items = [rng.choice(made) for _ in range(3)] + made if rng.random() < 0.3 else made
        by_kernel, by_python = both(items if seed % 2 else {f"k{number}": item for number, item in enumerate(items)}, monkeypatch)
        assert by_kernel == by_python, seed
        refused += isinstance(by_kernel, str)
    assert 0 < refused < len(seeds) // 2
    assert kernel.added > len(seeds)


@pytest.mark.filterwarnings("ignore")  # torch calls some of them prototypes
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, flat = random.Random(0), torch.zeros(STORAGE_BYTES, dtype=torch.uint8)
    by_kernel, by_python = both({"before": flat[:3], "it": REFUSED[name](rng, flat), "after": flat[5:]}, monkeypatch)
    assert by_kernel == by_python
    assert "it" in str(by_kernel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_takes_each_dtype(dtype: torch.dtype, kernel: CountingKernel) -> None:
    """Also in a run of others of the same size: no two dtypes are taken for one."""
    flat = torch.zeros(64, dtype=torch.uint8)
    others = [flat.view(other) for other in DTYPES if other.itemsize == dtype.itemsize and other is not dtype]
    table, items = TensorTable(), [*others, flat.view(dtype)]
    assert table.add_run(items, 0) == len(items)
    assert kernel.added == sum("bits" not in str(item.dtype) for item in items)  # DLPack has no name for these
    table.names = [""] * (len(others) + 1)
    assert table.columns()[0][-1].dtype == DTYPE_NAMES[dtype]
    assert len({spec.dtype for spec in table.columns()[0]}) == len(others) + 1


def test_the_kernel_goes_on_after_a_tensor_that_python_adds(kernel: CountingKernel) -> None:
    items = [torch.empty(0, 1), torch.ones(2), torch.ones(3), torch.empty(0, 1), torch.ones(4)]
    assert TensorTable().add_run(items, 0) == len(items)
    assert kernel.added == 3


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_tensor_that_is_too_large_is_refused_by_its_path(has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "HAS_KERNEL", has_kernel)
    with pytest.raises(UnsupportedValueError, match=r"cannot store a\.huge: ") as raised:
        capture({"a": {"before": torch.ones(2), "huge": torch.ones(1).expand(2**61)}})
    assert raised.value.object_id == "a.huge"


def test_another_meaning_of_the_table_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    expected = outcome(state)
    monkeypatch.setattr(tensor_table, "_RULES", (object(), *tensor_table._RULES[1:]))
    assert outcome(state) == expected


def test_no_question_follows_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, state = [], {"a": torch.ones(2), "b": torch.ones(3)}
    expected = outcome(state)

    def fail(_: object) -> int:
        asked.append("start")
        raise ValueError("injected")

    def size(_: object) -> int:
        asked.append("size")
        return 0

    rules = [*tensor_table._RULES]
    rules[rules.index(torch.UntypedStorage.data_ptr)], rules[rules.index(torch.UntypedStorage.nbytes)] = fail, size
    monkeypatch.setattr(tensor_table, "_RULES", (*rules,))
    assert outcome(state) == expected
    assert asked == ["start", "start"]


def test_a_tensor_that_changes_its_shape_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dims are freed when they become few; others of either shape are what they are."""
    asked = list[torch.dtype]()

    def probe(tensor: torch.Tensor) -> torch.dtype:
        if not asked:
            tensor.resize_(6)
        asked.append(tensor.dtype)
        return tensor.dtype

    monkeypatch.setattr(torch.Tensor, "probe", property(probe), raising=False)
    monkeypatch.setattr(tensor_table, "_RULES", tuple("probe" if rule == "dtype" else rule for rule in tensor_table._RULES))
    shape = (1, 2, 1, 3, 1, 1, 1)
    table = TensorTable()
    assert table.add_run([torch.ones(shape), torch.ones(shape), torch.ones(6)], 0) == len(asked) == 3
    table.names = ["a", "b", "c"]
    assert [spec.shape for spec in table.columns()[0]] == [shape, shape, (6,)]
