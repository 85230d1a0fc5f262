"""Planners and options of DCP, each with a store and with files: the same comes back, and the same is refused."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Reader, Writer
from tests.integrations.dcp.dcp_states import causes, difference

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:torch.distributed is unavailable", "ignore:`_get_pg_default_device`"
)

Planners = Callable[[], LoadPlanner | None]


class Both:
    """A store, and a folder for DCP's own files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer = Writer(folder / "store", "job", no_sync=True)
        self.saves = 0

    def save(self, state: dict[str, Any], planner: Callable[[], SavePlanner | None] = lambda: None, **options: Any) -> None:
        self.saves += 1
        files = FileSystemWriter(self.folder / f"files-{self.saves}", sync_files=False)
        dcp.save(state, storage_writer=files, planner=planner(), no_dist=True, **options)
        dcp.save(state, storage_writer=self.writer, planner=planner(), no_dist=True, **options)

    def readers(self) -> tuple[Reader, FileSystemReader]:
        return Reader(self.folder / "store", "job"), FileSystemReader(self.folder / f"files-{self.saves}")

    def load(self, target: Callable[[], dict[str, Any]], planner: Planners = lambda: None) -> dict[str, Any]:
        """What both load into what `target` makes."""
        found = []
        for reader in self.readers():
            state = target()
            dcp.load(state, storage_reader=reader, planner=planner(), no_dist=True)
            found.append(state)
        assert difference(found[1], found[0]) is None
        return found[0]

    def refusals(self, target: Callable[[], dict[str, Any]], planner: Planners = lambda: None) -> BaseException:
        """What both raise: the same."""
        found = []
        for reader in self.readers():
            with pytest.raises(dcp.api.CheckpointException) as raised:
                dcp.load(target(), storage_reader=reader, planner=planner(), no_dist=True)
            found += causes(raised.value)
        assert (type(found[0]), str(found[0])) == (type(found[1]), str(found[1]))
        return found[0]

    def checkout(self) -> Any:
        with tsck.open(self.folder / "store") as store:
            return store.checkout("job")


@pytest.fixture
def both(tmp_path: Path) -> Both:
    return Both(tmp_path)


def nested() -> dict[str, Any]:
    return {
        "model": {"a.b": torch.arange(6.0), "a": {"c": torch.ones(2, 3)}},
        "optimizer": {"state": {"0": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "list": [torch.ones(3), {"a": 1, "b": [torch.zeros(2), 3]}, 5],
        "step": 7,
    }


# --- what is there, and what is wanted ----------------------------------------------------------------------------------


def test_part_of_it(both: Both) -> None:
    both.save(nested())
    assert both.load(lambda: {"model": {"a.b": torch.zeros(6)}, "step": 0})["step"] == 7
    loaded = both.load(lambda: {"list": [torch.zeros(3), {"b": [torch.ones(2), 0]}]})
    assert loaded["list"][1] == {"b": [loaded["list"][1]["b"][0], 3]}
    assert both.load(dict) == {}


def test_missing_keys(both: Both) -> None:
    both.save(nested())

    def target() -> dict[str, Any]:
        return {"model": {"a.b": torch.zeros(6), "new": torch.full((2,), 5.0)}, "step": 0, "other": "kept"}

    assert "Missing key" in str(both.refusals(target))
    loaded = both.load(target, lambda: DefaultLoadPlanner(allow_partial_load=True))
    assert loaded["model"]["new"].tolist() == [5.0, 5.0]
    assert (loaded["step"], loaded["other"]) == (7, "kept")


def test_other_shapes_and_kinds(both: Both) -> None:
    both.save(nested())
    assert "Size mismatch" in str(both.refusals(lambda: {"model": {"a.b": torch.zeros(3, 2)}}))
    assert "expected BytesStorageMetadata" in str(both.refusals(lambda: {"model": {"a.b": 1}}))
    assert both.load(lambda: {"step": torch.zeros(3)}) == {"step": 7}


def test_dtypes_are_converted(both: Both) -> None:
    state = {"a": torch.randn(5, 7).bfloat16(), "b": torch.randn(9, dtype=torch.float64), "c": torch.arange(5), "d": torch.tensor(True)}
    both.save(state)

    def target() -> dict[str, Any]:
        return {"a": torch.zeros(5, 7), "b": torch.zeros(9, dtype=torch.float16), "c": torch.zeros(5), "d": torch.tensor(0.0)}

    assert difference({key: value.to(target()[key].dtype) for key, value in state.items()}, both.load(target)) is None


def test_targets_of_any_form(both: Both) -> None:
    """Filled where they lie, also through strides; nothing else of the memory is touched."""
    both.save({"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5), "c": torch.tensor(3.0), "d": torch.empty(0, 4)})
    memory = torch.full((8, 12), -1.0)
    for reader in both.readers():
        memory.fill_(-1)
        state = {"a": memory[1:7:2, ::3], "c": memory[0, 0], "d": torch.empty(0, 4).requires_grad_()}
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert torch.equal(memory[1:7:2, ::3], torch.arange(12.0).view(3, 4))
        assert memory[0, 0] == 3
        assert (memory == -1).sum() == 96 - 13
        parameter = torch.nn.Parameter(torch.zeros(4, 3).t())
        dcp.load({"a": parameter}, storage_reader=reader, no_dist=True)
        assert torch.equal(parameter.detach(), torch.arange(12.0).view(3, 4))
        assert parameter.requires_grad


def test_all_of_it_or_some_keys(both: Both) -> None:
    both.save(nested())
    for keys in (None, {"model.a"}, "model.a.c", {"list", "step"}, {"model"}):
        ours, theirs = (_load_state_dict_from_keys(keys, storage_reader=reader) for reader in both.readers())
        assert difference(theirs, ours) is None
        if keys is None:
            assert difference(nested(), ours) is None


def test_an_empty_state(both: Both) -> None:
    both.save({})
    assert both.load(dict) == {}
    assert both.checkout() == {}
    both.save({"a": {}, "b": {"c": {}}})
    assert both.load(dict) == {}


# --- objects with a state -----------------------------------------------------------------------------------------------


class Counter:
    def __init__(self, count: int) -> None:
        self.count, self.sums = count, torch.full((3,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.sums = state["count"], state["sums"]


def test_stateful(both: Both) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4)
    both.save({"counter": Counter(5), "model": model})
    for reader in both.readers():
        counter, other = Counter(0), torch.nn.Linear(3, 4)
        dcp.load({"counter": counter, "model": other}, storage_reader=reader, no_dist=True)
        assert (counter.count, counter.sums.tolist()) == (5, [5.0] * 3)
        assert difference(dict(model.state_dict()), dict(other.state_dict())) is None


# --- planners of one's own ----------------------------------------------------------------------------------------------


class RenamingSaver(DefaultSavePlanner):
    """As in torch's documentation."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"foo_" + key: value for key, value in state_dict.items()}, storage_meta, is_coordinator)


def test_renames(both: Both) -> None:
    state = {"a": torch.arange(5.0), "b": 3, "m": {"w": torch.ones(2)}}
    both.save(state, RenamingSaver)
    assert list(both.checkout()) == ["foo_a", "foo_b", "foo_m"]
    loaded = both.load(lambda: {"foo_a": torch.zeros(5), "foo_b": 0, "foo_m": {"w": torch.zeros(2)}})
    assert difference({f"foo_{key}": value for key, value in state.items()}, loaded) is None


class Bfloat16Saver(DefaultSavePlanner):
    """As in torch's documentation: plans what it gives."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.bfloat16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        return found.to(torch.bfloat16) if isinstance(found, torch.Tensor) else found


def test_a_planner_that_casts(both: Both) -> None:
    state: dict[str, Any] = {"w": torch.randn(7, 5), "step": 3}
    both.save(state, Bfloat16Saver)
    assert both.checkout()["w"].dtype == torch.bfloat16
    both.load(lambda: {"w": torch.zeros(7, 5, dtype=torch.bfloat16), "step": 0})
    loaded = both.load(lambda: {"w": torch.zeros(7, 5), "step": 0})
    assert torch.equal(loaded["w"], state["w"].bfloat16().float())


@pytest.mark.skipif(hasattr(dcp, "CheckpointableTensor"), reason="this torch plans its boxes")
def test_boxes_that_an_older_torch_does_not_plan_are_refused(both: Both) -> None:
    tensor: Any = torch.ones(4, 5)
    tensor.global_shape, tensor.local_sizes = (4, 5), ((2, 5),)  # the rest is a gap
    tensor.global_offsets = tensor.local_offsets = ((0, 0),)
    with pytest.raises(dcp.api.CheckpointException, match=r"cannot store w: it holds boxes of .*\[4, 5\] .* use torch 2\.15 or newer"):
        dcp.save({"w": tensor}, storage_writer=both.writer, no_dist=True)


def test_tensors_are_described_as_by_files(both: Both) -> None:
    both.save(nested())
    told, expected = (reader.read_metadata().state_dict_metadata for reader in both.readers())
    assert {name: vars(entry) for name, entry in told.items()} == {name: vars(entry) for name, entry in expected.items()}


class Json(DefaultSavePlanner):
    """Bytes that torch did not make."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - its name is torch's
        return io.BytesIO(b'{"a": 1}') if write_item.type == WriteItemType.BYTE_IO else object


def test_a_planner_whose_bytes_are_not_torchs(both: Both) -> None:
    with pytest.raises(dcp.api.CheckpointException, match="cannot store step") as raised:
        dcp.save({"step": 1}, storage_writer=both.writer, planner=Json(), no_dist=True)
    assert [type(cause) for cause in causes(raised.value)] == [tsck.UnsupportedValueError]


class Doubling(DefaultSavePlanner):
    """Also of what is not a tensor."""

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return found * 2 if isinstance(found, int) else found


class Tripling(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        if write_item.type != WriteItemType.BYTE_IO:
            return found
        assert isinstance(found, io.BytesIO)
        found.seek(0)
        stream = io.BytesIO()
        torch.save(torch.load(found) * 3, stream)
        return stream


@pytest.mark.parametrize(("planner", "expected"), [(Doubling, 14), (Tripling, 21)])
def test_planners_that_change_values(both: Both, planner: type[DefaultSavePlanner], expected: int) -> None:
    both.save({"step": 7, "w": torch.ones(2)}, planner)
    assert both.load(lambda: {"step": 0}) == {"step": expected}


class ExtraData(DefaultSavePlanner):
    """As in torch's documentation: with planner data of its own."""

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data="of this rank")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=[plan.planner_data for plan in plans])


def test_a_planner_with_data_of_its_own(both: Both) -> None:
    both.save({"a": 1, "b": torch.ones(3)}, lambda: ExtraData(flatten_state_dict=False))
    loaded = both.load(
        lambda: {"a": 0, "b": torch.zeros(3)}, lambda: DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    )
    assert loaded["a"] == 1


class Copying(DefaultLoadPlanner):
    """As in torch's documentation: reads elsewhere, and commits."""

    committed: int = 0

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed += 1
        self.state_dict[read_item.dest_index.fqn] = tensor
        self.original_state_dict[read_item.dest_index.fqn] = tensor


def test_a_planner_that_commits(both: Both) -> None:
    both.save({"a": torch.arange(5.0), "b": torch.ones(2)})
    loaded = both.load(lambda: {"a": torch.zeros(5), "b": torch.zeros(2)}, Copying)
    assert loaded["a"].tolist() == [0, 1, 2, 3, 4]


class Removing(DefaultSavePlanner):
    """Leaves items out of the plan."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=[item for item in plan.items if not item.index.fqn.startswith("skip")])


def test_a_planner_that_leaves_out(both: Both) -> None:
    both.save({"skip": {"a": 1}, "a": torch.ones(2), "list": [torch.ones(1), 2]}, Removing)
    assert list(both.checkout()) == ["a", "list"]
    both.load(lambda: {"a": torch.zeros(2), "list": [torch.zeros(1), 0]})
