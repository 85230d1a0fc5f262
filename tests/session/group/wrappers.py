"""Run by ranks: quantised tensors that lie as DTensors in several ways, all with the bits of the same whole ones."""

import logging
from math import prod
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import tensorstore_ck as tsck
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, opened

RANKS: Final = 4
SHAPE: Final = (10, 1024)
"""10 rows on 4 ranks: uneven."""
Way = tuple[tuple[int, ...], tuple[Placement, ...]]
WAYS: Final[dict[str, Way]] = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "replicated": ((4,), (Replicate(),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "rows-columns": ((2, 2), (Shard(0), Shard(1))),
}


def torchao() -> Any:
    """Its noise says what of it needs a GPU."""
    logging.disable(logging.WARNING)
    vars(torch)["compile"] = lambda function=None, **_: function  # compiling a step takes longer than all else here
    import torchao.optim
    import torchao.quantization
    from torchao.optim import subclass_4bit, subclass_8bit, subclass_fp8

    logging.disable(logging.NOTSET)
    return subclass_8bit.OptimState8bit, subclass_4bit.OptimState4bit, subclass_fp8.OptimStateFp8, torchao.quantization.Int8Tensor


def whole(seed: int) -> dict[str, torch.Tensor]:
    """The inner tensors of all."""
    random = torch.Generator().manual_seed(seed)
    count = prod(SHAPE)
    return {
        "codes": torch.randint(256, SHAPE, dtype=torch.uint8, generator=random),
        "scale 256": torch.rand(count // 256, generator=random),
        "packed": torch.randint(256, (count // 2,), dtype=torch.uint8, generator=random),
        "scale 128": torch.rand(count // 128, generator=random),
        "fp8": torch.rand(SHAPE, generator=random).to(torch.float8_e4m3fn),
        "qdata": torch.randint(-128, 128, SHAPE, dtype=torch.int8, generator=random),
        "row scale": torch.rand((SHAPE[0], 1), generator=random),
        "qmap": torch.rand(256, generator=random),
    }


def locals_of(parts: dict[str, torch.Tensor], elements: torch.Tensor, shape: Any) -> dict[str, torch.Tensor]:
    """The tensors of one rank, which has these elements of the flattened whole."""
    bits8, bits4, fp8, int8 = torchao()
    flat = elements.reshape(-1)
    own = {name: part.view(torch.uint8).view(-1)[flat].view(part.dtype).view(shape) for name, part in parts.items() if part.shape == SHAPE}
    rows = elements[:, :1] // SHAPE[1]
    scale256, scale128 = parts["scale 256"][flat[::256] // 256], parts["scale 128"][flat[::128] // 128]
    return {
        "bits8": bits8(own["codes"], scale256, parts["qmap"].clone(), True, torch.float32),
        "bits4": bits4(parts["packed"][flat[::2] // 2], scale128, parts["qmap"][:16].clone(), False, torch.Size(shape), torch.float32),
        "fp8": fp8(own["fp8"], scale256.clone(), torch.float32),
        "int8": int8(own["qdata"], parts["row scale"].view(-1)[rows], [1, shape[1]], torch.bfloat16),
        "two": TwoTensor(own["codes"].float(), own["codes"].float() + 1),  # type: ignore[no-untyped-call]
    }


def parts_of(tensor: Any) -> dict[str, torch.Tensor]:
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def state_of(way: Way, seed: int) -> dict[str, Any]:
    mesh = grid(way[0])
    indexes = distribute_tensor(torch.arange(prod(SHAPE)).view(SHAPE), mesh, way[1], src_data_rank=None).to_local()
    own = locals_of(whole(seed), indexes, tuple(indexes.shape))
    return {name: dtensor(local, mesh, way[1]) for name, local in own.items()}


def grid(shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(prod(shape)).view(shape), _init_backend=False)


def dtensor(local: Any, mesh: Any, placements: Any) -> Any:
    """`DTensor.from_local`, also of what torch cannot view: not all of torchao's do that."""
    found = DTensor.from_local(
        torch.empty(local.shape, dtype=local.dtype), mesh, placements, run_check=False, shape=torch.Size(SHAPE), stride=(SHAPE[1], 1)
    )
    found._local_tensor = local
    return found


@torch.no_grad()
def local_of(value: Any) -> Any:
    """The object that the DTensor has, if it is one: with gradients, torch would make a view, which not all of torchao's can."""
    return value.to_local() if isinstance(value, DTensor) else value


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        one, other = local_of(found[name]), local_of(value)
        assert type(one) is type(other), name
        assert one.shape == other.shape, name
        for key, part in parts_of(other).items():
            assert torch.equal(parts_of(one)[key].view(torch.uint8), part.view(torch.uint8)), f"{name}.{key}"


def put_one(folder: str, name: str, seed: int) -> str:
    register()
    state = state_of(WAYS[name], seed)
    store = opened(folder, RANKS)
    store.put_snapshot(state, ref=name, group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS)
    return store.put_snapshot_async(state, ref=f"{name}-async", group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS).wait().root


def register() -> None:
    tsck.register_type(TwoTensor, "tests.TwoTensor")


def restore_all(folder: str, name: str, seed: int) -> None:
    """Into itself and two other ways."""
    names = list(WAYS)
    for step in range(3):
        way = WAYS[names[(names.index(name) + step) % len(names)]]
        target = state_of(way, seed + 1)
        memory = {key: parts_of(local_of(value)) for key, value in target.items()}
        restored = opened(folder, RANKS).checkout(name, into=target, group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS)
        require_equal(restored, state_of(way, seed))
        for key, value in restored.items():
            assert value is target[key]
            inner = parts_of(local_of(value))
            assert all(inner[part].data_ptr() == tensor.data_ptr() for part, tensor in memory[key].items())


def refusals(folder: str) -> list[str]:
    """Blocks that lie across what others hold: the same layout takes them, and no other."""
    _, bits4, _, _ = torchao()
    store = opened(folder, RANKS)

    def state(placement: Placement) -> dict[str, Any]:
        mesh = grid((RANKS,))
        shape = (8, 64) if placement.is_shard(1) else (2, 256)
        random = torch.Generator().manual_seed(dist.get_rank())
        scale = torch.rand(4, generator=random)
        local = bits4(torch.zeros(256, dtype=torch.uint8), scale, torch.zeros(16), True, torch.Size(shape), torch.float32)
        return {"m": DTensor.from_local(local, mesh, [placement], run_check=False)}

    store.put_snapshot(state(Shard(1)), ref="bound", group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS)
    target = state(Shard(1))
    local_of(target["m"]).scale.zero_()
    store.checkout("bound", into=target, group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS)
    require_equal(target, state(Shard(1)))
    told = []
    for attempt in (
        lambda: store.checkout("bound", into=state(Shard(0)), group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS),
        lambda: store.checkout("bound"),
    ):
        try:
            attempt()  # type: ignore[no-untyped-call]
        except tsck.StoreError as exc:
            told.append(f"{type(exc.__cause__ or exc).__name__}: {exc}")
    return told


def trained(ranks: int, name: str, seed: int) -> dict[str, Any]:
    """A real model and optimizer under FSDP2, after a step."""
    torchao()
    from torchao import optim

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128))
    fully_shard(model, mesh=DeviceMesh.from_group(GROUPS[ranks], "cpu"))
    optimizer = getattr(optim, name)(model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def put_trained(folder: str, name: str) -> list[Any]:
    state = trained(4, name, 1)
    opened(folder, 4).put_snapshot(state, ref=name, group=GROUPS[4], timeout_seconds=TIMEOUT_SECONDS)
    return summary(state)


def restore_trained(folder: str, ranks: int, name: str) -> list[Any]:
    state = trained(ranks, name, 2)
    opened(folder, ranks).checkout(name, into=state, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
    return summary(state)


def summary(state: dict[str, Any]) -> list[Any]:
    """Path, class and inner tensors of this rank's moments."""
    found = []
    for path, moments in state["optimizer"]["state"].items():
        for key, value in moments.items():
            local = local_of(value)
            inner = parts_of(local) if hasattr(local, "__tensor_flatten__") else {"": local}
            found.append((f"{path}.{key}", type(local).__name__, {part: tensor.detach().clone() for part, tensor in inner.items()}))
    return found
