"""Everything that DCP hands over comes back as through its own files; what cannot be stored is refused by name."""

import logging
import random
import warnings
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Reader, Writer
from tests.integrations.dcp.dcp_states import blank, causes, difference
from tests.state.samples import DTYPES, NUMPY_DTYPES, tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:torch.distributed is unavailable")


class Odd:
    pass


class Zipping(DefaultSavePlanner):
    """So that values come as zips, as they do from any planner that is not torch's own."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(write_item)


def values() -> dict[str, Any]:
    weight = torch.arange(6.0).view(2, 3)
    return {
        "plain": {
            "none": None,
            "bools": [True, False],
            "ints": {"small": 3, "large": 2**63, "huge": -(2**200)},
            "floats": [0.0, -0.0, float("inf"), 1e-320],
            "complex": 1 - 2j,
            "texts": {"": "", "ü": "ж\ud800", "x.y": "long" * 5000},
            "bytes": [b"", b"\0\xff" * 40_000, bytearray(b"ab")],
            "tuples": [(), (1, "a", (2.5, None)), ((),)],
            "lists": [[], [1, 2, 3], [1, "a", None, 2.5], [[1], [2, [3, (4,)]]]],
            "sets": {"set": {1, "a"}, "frozen": frozenset({(1, 2)})},
        },
        "torch": {"size": torch.Size([1, 2]), "dtype": torch.bfloat16, "device": torch.device("cuda:1")},
        "mappings": {"ordered": OrderedDict(b=1, a=weight), "counted": Counter("aab"), "default": defaultdict(int, {"a": 1})},
        "keys": {0: weight, 2: {True: 3}, None: 4, "a.b": {"c": 5}, "": {"": 6}, "k" * 3000: 7},
        "lists": [weight, {"a": 1, "b": [weight + 1, 2]}, 5, [], (weight, {"c": weight, 3: (1, {"x": [2]})})],
        "leaves of tuples": (torch.nn.Parameter(weight.clone()), weight.clone().requires_grad_(), torch.empty(0, 3), torch.tensor(2.5)),
        "arrays": {
            dtype: np.frombuffer(random.Random(1).randbytes(4 * np.dtype(dtype).itemsize), dtype).reshape(2, 2)
            for dtype in NUMPY_DTYPES
            if np.dtype(dtype).isnative and np.dtype(dtype).kind not in "bUS"  # torch.load changes the byte order of others
        },
        "more arrays": [np.array(["ab", "c"]), np.array([b"x"]), np.zeros((0, 3)), np.array(2.5), np.array([True]), (np.arange(3),)],
        "numpy scalars": [np.int64(3), np.float32(2.5), np.bool_(True), np.str_("x"), np.datetime64("2020-01-01"), np.longdouble(1.5)],
        "generators": {
            "python": random.Random(1).getstate(),
            "numpy": np.random.RandomState(1).get_state(),
            "pcg": np.random.default_rng(1).bit_generator.state,
            "mt": np.random.Generator(np.random.MT19937(3)).bit_generator.state,
            "torch": torch.Generator().manual_seed(3).get_state(),
        },
        "dtypes": {str(dtype): tensor(dtype, (3, 5), seed=2) for dtype in DTYPES if storable(dtype)},
        "forms": {
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 5),
            "grad": weight.clone().requires_grad_(),
            "transposed": torch.randn(30, 40).t(),
            "expanded": torch.ones(1).expand(4, 5),
            "stepped": torch.arange(20)[::3],
            "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
            "negative": torch.tensor([1 + 2j]).conj().imag,
            "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "tied": weight,
            "tied, too": weight,
            "view": weight[:, 1:],
        },
    }


def storable(dtype: torch.dtype) -> bool:
    try:
        torch.zeros(2, dtype=torch.uint8).view(dtype)
        tensor(dtype, (3, 5)).clone()
    except (RuntimeError, TypeError):
        return False
    return "bits" not in str(dtype)


def save_both(folder: Path, state: dict[str, Any], planner: DefaultSavePlanner) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(folder / "files", sync_files=False), planner=planner, no_dist=True)
    dcp.save(state, storage_writer=Writer(folder / "store", "job", no_sync=True), planner=planner, no_dist=True)


@pytest.mark.parametrize("planner", [DefaultSavePlanner, Zipping])
def test_values(tmp_path: Path, planner: type[DefaultSavePlanner]) -> None:
    state = values()
    save_both(tmp_path, state, planner())
    readers = Reader(tmp_path / "store", "job"), FileSystemReader(tmp_path / "files")
    targets = [blank(state) for _ in readers]
    for target, reader in zip(targets, readers, strict=True):
        dcp.load(target, storage_reader=reader, no_dist=True)
    assert difference(targets[1], targets[0]) is None
    ours, theirs = (_load_state_dict_from_keys(storage_reader=reader) for reader in readers)
    assert difference(theirs, ours) is None
    with tsck.open(tmp_path / "store") as store:
        assert difference(without_grad(theirs), without_grad(store.checkout("job"))) is None
        assert store.fsck(read_data=True).ok


def without_grad(value: Any) -> Any:
    """DCP makes new tensors without it; a checkout does not."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: without_grad(item) for key, item in value.items()}
    return [without_grad(item) for item in value] if isinstance(value, list) else value


def test_not_flattened(tmp_path: Path) -> None:
    """Each value is one item, whatever is in it."""
    state = values()
    save_both(tmp_path, state, DefaultSavePlanner(flatten_state_dict=False))
    found = []
    for reader in (Reader(tmp_path / "store", "job"), FileSystemReader(tmp_path / "files")):
        target: dict[str, Any] = dict.fromkeys(state)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
        found.append(target)
    assert difference(found[1], found[0]) is None
    with tsck.open(tmp_path / "store") as store:
        assert difference(found[1], store.checkout("job")) is None


def deep(wrap: Any) -> Any:
    value = 1
    for _ in range(200):
        value = wrap(value)
    return value


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    REFUSED: dict[str, Any] = {
        "instance": Odd(),
        "lambda": lambda: 1,
        "function": len,
        "class": dict,
        "generator": torch.Generator(),
        "objects": np.array([1, None], dtype=object),
        "struct": np.zeros(2, dtype=[("a", "i4")]),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.empty(3, device="meta"),
        "in a tuple": (1, {"a": Odd()}),
        "sparse in a tuple": (torch.eye(3).to_sparse(),),
        "meta in a tuple": (torch.empty(3, device="meta"),),
        "deep lists": deep(lambda value: [value]),
        "deep tuples": deep(lambda value: (value,)),
        "deep dicts": deep(lambda value: {"a": value}),
    }


@pytest.mark.parametrize("planner", [DefaultSavePlanner, Zipping])
def test_what_cannot_be_stored(tmp_path: Path, planner: type[DefaultSavePlanner]) -> None:
    writer = Writer(tmp_path / "store", "job", no_sync=True)
    for name, value in REFUSED.items():
        with pytest.raises(dcp.api.CheckpointException) as raised:
            dcp.save({"w": torch.ones(3), "model": {name: value}}, storage_writer=writer, planner=planner(), no_dist=True)
        (cause,) = causes(raised.value)
        if isinstance(cause, tsck.StoreError) or (planner is DefaultSavePlanner and name != "csr"):  # torch itself may refuse it earlier
            assert isinstance(cause, tsck.UnsupportedValueError), (name, cause)
            assert f"model.{name}" in str(cause)
    with tsck.open(tmp_path / "store") as store, pytest.raises(tsck.NotFoundError):
        store.checkout("job")
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=planner(), no_dist=True)


# --- wrapper subclasses: `Writer` refuses them by name, `Reader` gives their inner tensors ----------------------------------


def moment(value: float = 0.0) -> Any:
    logging.disable(logging.WARNING)
    from torchao.optim.subclass_8bit import OptimState8bit

    logging.disable(logging.NOTSET)
    made = OptimState8bit.zeros((16, 256))
    made.codes.fill_(int(value))
    made.scale.fill_(value)
    return made


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_writer_refuses_what_it_cannot_store_by_name(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True) as store:
        with pytest.raises((CheckpointException, tsck.UnsupportedValueError), match=r"optimizer\.m.*OptimState8bit"):
            dcp.save({"optimizer": {"m": moment()}}, storage_writer=Writer(store, "main"), no_dist=True)
        assert not store.branches()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_reader_gives_inner_tensors_by_their_own_names(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True) as store:
        store.put_snapshot({"m": moment(3.0), "w": torch.ones(4)}, ref="main")
        state: dict[str, Any] = {"m": {"codes": torch.zeros(16, 256, dtype=torch.uint8), "scale": torch.zeros(16)}, "w": torch.zeros(4)}
        dcp.load(state, storage_reader=Reader(store, "main"), no_dist=True)
        assert state["m"]["codes"].float().mean() == state["m"]["scale"].mean() == 3
        assert bool((state["w"] == 1).all())
