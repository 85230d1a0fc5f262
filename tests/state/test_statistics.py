"""Statistics of stored tensors, and of their changes, compared with what torch and numpy say of the whole tensors."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.opening import init_store, make_engine
from tensorstore_ck.errors import InvalidOptionError, MismatchError
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.state import read_pieces
from tensorstore_ck.state.statistics import ChangeStatistics, TensorStatistics
from tensorstore_ck.store import Store

NAN, INF = math.nan, math.inf


class Counting(MemoryBackend):
    """Remembers what was read of packs, and the largest read."""

    read_bytes = 0

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self.read_bytes += len(target)
        super().read_into(name, offset, target)


@pytest.fixture
def backend() -> Counting:
    return Counting()


@pytest.fixture
def store(backend: Counting) -> Iterator[Store]:
    with Store(make_engine(backend, init_store(backend), MemoryTable())) as opened:
        yield opened


def statistics(store: Store, state: object, bins: int = 0) -> dict[str, TensorStatistics]:
    store.put_snapshot(state, ref="a", codec="raw")
    return {each.name: each for each in store.statistics("a", bins=bins)}


def test_what_is_counted_and_what_is_finite(store: Store) -> None:
    found = statistics(store, {"w": torch.tensor([[1.0, NAN, -3.0], [INF, -INF, -0.0]]), "n": 3, "none": torch.full((2,), NAN)}, bins=2)
    assert list(found) == ["w", "none"]
    one = found["w"]
    assert (one.dtype, one.shape, one.count, one.nan, one.inf, one.zeros) == ("float32", (2, 3), 6, 1, 2, 1)
    assert (one.min, one.max, one.mean, one.norm) == pytest.approx((-3, 1, -2 / 3, math.sqrt(10)))
    assert one.std == pytest.approx(np.std([1, -3, 0]))
    assert one.histogram is not None
    assert (one.histogram.edges, one.histogram.counts) == ((-3, -1, 1), (1, 2))
    assert found["none"] == TensorStatistics("none", "float32", (2,), 2, 2, 0, 0)


NUMBERS = torch.linspace(-2, 3, 40_000)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int8, torch.bool]
)
def test_dtypes(store: Store, dtype: torch.dtype) -> None:
    tensor = NUMBERS.to(dtype)
    one = statistics(store, {"w": tensor}, bins=10)["w"]
    expected = tensor.double().numpy()
    assert (one.count, one.nan, one.inf, one.zeros) == (40_000, 0, 0, int((expected == 0).sum()))
    numbers = (one.min, one.max, one.mean, one.std, one.norm)
    assert numbers == pytest.approx((expected.min(), expected.max(), expected.mean(), expected.std(), np.linalg.norm(expected)), rel=1e-12)
    counts, edges = np.histogram(expected, 10)
    assert one.histogram is not None
    assert (one.histogram.counts, one.histogram.edges) == (tuple(counts), tuple(edges))


def test_what_are_no_real_numbers(store: Store) -> None:
    found = statistics(
        store,
        {
            "complex": torch.tensor([3 + 4j, 0j, complex(NAN, INF), complex(1, INF)]),
            "packed": torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "times": np.array(["2020-01-01"], "M8[s]"),
            "text": np.array(["a", "b"]),
            "big_endian": np.array([1, 2], ">i4"),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(2.0),
        },
        bins=3,
    )
    assert found["complex"] == TensorStatistics("complex", "complex64", (4,), 4, 1, 1, 1, norm=5.0)
    assert found["packed"] == TensorStatistics("packed", "float4_e2m1fn_x2", (3,), 3)
    assert found["times"].nan is found["text"].nan is None
    assert (found["big_endian"].min, found["big_endian"].max) == (1, 2)
    assert found["empty"] == TensorStatistics("empty", "float32", (0, 3), 0, 0, 0, 0)
    scalar = found["scalar"].histogram
    assert scalar is not None
    assert (found["scalar"].std, scalar.edges[0], scalar.edges[-1], scalar.counts) == (0, 1.5, 2.5, (0, 1, 0))


def test_a_large_mean_hides_no_deviation(store: Store) -> None:
    found = statistics(
        store, {"far": torch.arange(50_000, dtype=torch.float64) % 2 + 1e9, "huge": torch.full((3,), 1e308, dtype=torch.float64)}
    )
    assert found["far"].std == pytest.approx(0.5, rel=1e-9)
    assert (found["huge"].mean, found["huge"].std, found["huge"].norm) == pytest.approx((1e308, 0, INF))


def test_tensors_that_share_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_pieces, "PIECE_BYTES", 16)
    base = torch.arange(12.0).reshape(3, 4)
    found = statistics(
        store, {"w": base, "tied": base, "turned": base.T, "row": base[1], "column": base[:, 1], "same": base[0, :1].expand(5)}
    )
    assert found["tied"].norm == found["w"].norm == found["turned"].norm == pytest.approx(np.linalg.norm(np.arange(12)))
    assert (found["turned"].shape, found["turned"].mean) == ((4, 3), 5.5)
    assert (found["row"].min, found["row"].max, found["column"].mean, found["same"].count) == (4, 7, 5, 5)


def test_select(store: Store) -> None:
    store.put_snapshot({"model": {"a": torch.ones(2), "b": torch.ones(3)}, "optim": torch.ones(1)}, ref="a")
    assert [each.name for each in store.statistics("a", ["model.*"])] == ["model.a", "model.b"]
    with pytest.raises(MismatchError, match="nothing in the snapshot fits 'nope'"):
        store.statistics("a", ["model.*", "nope"])
    with pytest.raises(InvalidOptionError, match="bins"):
        store.statistics("a", bins=-1)
    store.put_snapshot({"model": {"a": torch.zeros(2), "new": torch.ones(2)}, "optim": torch.zeros(1)}, ref="a")
    assert [each.name for each in store.change_statistics("a~1", "a", ["model.*"])] == ["model.a", "model.new", "model.b"]
    with pytest.raises(MismatchError, match="'nope'"):
        store.change_statistics("a~1", "a", ["model.a", "nope"])


def test_pieces_are_bounded_and_nothing_is_read_twice(store: Store, backend: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts lie between blocks: of a tensor whose rows are longer than a piece, too."""
    state = {"rows": torch.rand(2000, 3000), "long": torch.rand(3, 3_000_000), "small": {str(n): torch.rand(2000) for n in range(100)}}
    store.put_snapshot(state, ref="a", codec="raw")
    monkeypatch.setattr(read_pieces, "PIECE_BYTES", 8 << 20)
    monkeypatch.setattr(read_pieces, "BATCH_BYTES", 16 << 20)
    batches = list[int]()
    read = read_pieces.read_pieces

    def counting(pieces: list[read_pieces.Piece]) -> object:
        found = read(pieces)
        batches.append(sum(each.nbytes for each in found))
        return found

    monkeypatch.setattr("tensorstore_ck.state.statistics.read_pieces", counting)
    backend.read_bytes = 0
    found = {each.name: each.mean for each in store.statistics("a")}
    size = 24_000_000 + 36_000_000 + 800_000
    assert sum(batches) == size
    assert 4 <= len(batches) <= 8
    assert max(batches) <= 16 << 20
    assert size <= backend.read_bytes < size + 100_000
    assert found["long"] == pytest.approx(state["long"].double().mean().item())  # type: ignore[attr-defined]


def test_changes(store: Store, backend: Counting) -> None:
    same = torch.ones(100_000)
    old = {
        "same": same,
        "little": torch.ones(4),
        "much": torch.ones(4),
        "from_zero": torch.zeros(2),
        "blew_up": torch.tensor([1.0, NAN, INF]),
        "to_half": torch.ones(2),
        "shape": torch.ones(2),
        "gone": torch.ones(2),
        "text": np.array(["a"]),
    }
    new = {
        "same": same,
        "little": torch.tensor([1.0, 1, 1, 1.5]),
        "much": -torch.ones(4),
        "from_zero": torch.tensor([0.0, 1]),
        "blew_up": torch.tensor([NAN, NAN, INF]),
        "to_half": torch.ones(2, dtype=torch.float16),
        "shape": torch.ones(2, 1),
        "fresh": torch.ones(3),
        "text": np.array(["b"]),
    }
    store.put_snapshot(old, ref="a", codec="raw")
    store.put_snapshot(new, ref="a", codec="raw")
    backend.read_bytes = 0
    found = store.change_statistics("a~1", "a")
    assert backend.read_bytes < 100_000
    one, two, four = (("float32", (n,)) for n in (3, 2, 4))
    assert found == [
        ChangeStatistics("from_zero", "changed", two, two, 1, INF, 0, 0),
        ChangeStatistics("blew_up", "changed", one, one, INF, INF, 2, 1),
        ChangeStatistics("much", "changed", four, four, 2, 2, 0, 0),
        ChangeStatistics("little", "changed", four, four, 0.5, 0.25, 0, 0),
        ChangeStatistics("to_half", "changed", two, ("float16", (2,)), 0, 0, 0, 0),
        ChangeStatistics("text", "changed", ("np:<U1", (1,)), ("np:<U1", (1,))),
        ChangeStatistics("shape", "reshaped", two, ("float32", (2, 1))),
        ChangeStatistics("fresh", "added", None, one),
        ChangeStatistics("gone", "removed", two, None),
    ]
    assert store.change_statistics("a", "a") == []


def test_changes_of_the_same_nan_and_of_views(store: Store) -> None:
    base = torch.tensor([[1.0, NAN], [2.0, 3.0]])
    store.put_snapshot({"w": base, "row": base[0], "turned": base.T, "tied": base}, ref="a")
    base[1, 0] = 5
    store.put_snapshot({"w": base, "row": base[0], "turned": base.T, "tied": base.clone()}, ref="a")
    found = {each.name: each for each in store.change_statistics("a~1", "a")}
    assert set(found) == {"w", "turned", "tied"}
    for each in found.values():
        assert (each.max_change, each.relative_change, each.nan) == pytest.approx((3, 3 / math.sqrt(14), 1))
