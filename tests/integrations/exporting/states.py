"""States and snapshots to export, and how their files are read by the programs that they are for."""

import dataclasses
import io
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.format.sharding import Mesh, Shard
from tensorstore_ck.format.store_config import CONFIG_NAME, new_config
from tensorstore_ck.store import Store
from tests.gc.stores import open_store
from tests.session.group.states import Spreading, captured, sharded, whole
from tests.session.group.stores import put_all
from tests.state.samples import DTYPES, tensor

BLOCK_BYTES = 4096
RANKS = 4
MESHES = [Mesh((2, 2), (0, 1, 2, 3)), Mesh((4,), (0, 1, 2, 3))]


def small_blocks() -> MemoryBackend:
    """The location of a store whose tensors have many blocks."""
    backend = MemoryBackend()
    backend.create(CONFIG_NAME, dataclasses.replace(new_config(exclusive_create=True), block_bytes=BLOCK_BYTES).encode())
    return backend


def training_state() -> dict[str, Any]:
    """What `torch.load(weights_only=True)` takes, of every kind."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.BatchNorm1d(48), torch.nn.Linear(48, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    base = torch.randn(100, 64)
    flat = torch.randn(5000)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "dtypes": {str(dtype).removeprefix("torch."): tensor(dtype, (7, 3), 1) for dtype in DTYPES if dtype.itemsize},
        "tied": {"embedding": base, "head": base, "row": base[3], "turned": base.t(), "wide": base[:1].expand(50, 64)},
        "neighbours": [flat[:1000], flat[1000:1001], flat[3000:].view(100, 20)],
        "parameter": torch.nn.Parameter(torch.randn(30, 40)),
        "grad": torch.randn(4, requires_grad=True),
        "order": {"convolution": torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last), "turned": torch.randn(40, 30).t()},
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 5),
        "large": torch.randn(300, 300),
        "step": 12,
        "values": [None, True, 2**70, -0.5, float("nan"), "text\n\u2603", b"bytes", (1, (2.5, "x")), [1, 2], {3: "three", "k": {}}],
        "types": [torch.float16, torch.device("cpu"), torch.Size([1, 2])],
        "counts": Counter("aab"),
        "ordered": OrderedDict(b=1, a=torch.ones(2)),
        "../../up": torch.arange(3),
        "/etc/name": {"..": torch.arange(4)},
    }


SUPPORTED = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"),
}
"""The dtypes of safetensors."""


def without_unsavable(state: dict[str, Any]) -> list[str]:
    """Takes tensors out of a training state whose dtype torch itself cannot save, and returns their names."""
    names = []
    for name, found in list(state["dtypes"].items()):
        try:
            torch.save(found, io.BytesIO())
            torch._utils._element_size(found.dtype)  # type: ignore[no-untyped-call]  # what DCP needs
        except (KeyError, TypeError):
            names.append(f"dtypes.{name}")
            del state["dtypes"][name]
    assert state["dtypes"].keys() >= SUPPORTED
    return names


def tensors_of(state: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Path -> tensor."""
    if isinstance(state, torch.Tensor):
        return {name: state}
    items: Any = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list | tuple) else ()
    return {path: found for key, item in items for path, found in tensors_of(item, f"{name}.{key}" if name else str(key)).items()}


def load_dcp(folder: Path) -> dict[str, Any]:
    """All of a checkpoint, as `dcp_to_torch_save` reads it."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    return state


# --- saved by several ranks -------------------------------------------------------------------------------------------------


SPREADINGS = {
    "fsdp": Spreading(whole((1000, 5)), sharded(1, Shard(0))),
    "tp": Spreading(whole((64, 100), 1), sharded(0, Shard(0), Shard(1))),
    "columns": Spreading(whole((60, 90), 2), sharded(1, Shard(1))),
    "same": Spreading(whole((10, 1000), 3), None),
    "hsdp": Spreading(whole((300, 30), 4), sharded(0, None, Shard(0))),
    "small": Spreading(whole((37,), 5), sharded(1, Shard(0))),
    "deep": Spreading(whole((6, 50, 40), 6), sharded(1, Shard(2))),
}


def many_ranks() -> tuple[Store, dict[str, torch.Tensor]]:
    """A store with a snapshot ``job`` of four ranks, and the whole tensors in it."""
    backend = small_blocks()
    put_all(backend, RANKS, lambda rank: as_torch(captured(SPREADINGS, MESHES, rank, RANKS, ["text", 7])))
    return open_store(backend), {name: torch.from_numpy(each.whole) for name, each in SPREADINGS.items()}


def as_torch(taken: CapturedState) -> CapturedState:
    """As a dict of int32 tensors and two values."""
    specs = [spec._replace(dtype="int32") for spec in taken.layout.tensors]
    tree = ["d", [*(spec.name for spec in specs), "text", "number"], [*range(len(specs)), None, None]]
    return taken._replace(layout=dataclasses.replace(taken.layout, tensors=specs, tree=tree))
