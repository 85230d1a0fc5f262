"""A resumed training has the bits of one that went on: kernels, generators, scalers, gradients, FSDP2 over NCCL."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tensorstore_ck as tsck
from tests.gpu.kinds import clones, different

REF = "runs/training"


class Job:
    """A small model with everything whose bits are easily lost."""

    def __init__(self, device: torch.device, memory_format: torch.memory_format) -> None:
        torch.manual_seed(0)
        self.device = device
        layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 14 * 14, 10)]
        self.model = nn.Sequential(*layers).to(device, memory_format=memory_format)  # type: ignore[call-overload]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)
        self.scaler = torch.amp.GradScaler(device.type)
        self.training = tsck.TrainingState(model=self.model, optimizer=self.optimizer, scaler=self.scaler)

    def backward(self) -> None:
        images = torch.randn(32, 3, 16, 16, device=self.device)
        with torch.autocast(self.device.type, dtype=torch.float16 if self.device.type == "cuda" else torch.bfloat16):
            loss = self.model(images).square().mean()
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step()

    def values(self) -> dict[str, torch.Tensor]:
        return clones(self.model.state_dict())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_resumed_run_has_the_same_bits(
    device: torch.device, store: tsck.Store, memory_format: torch.memory_format, is_waited_for: bool
) -> None:
    job = Job(device, memory_format)
    job.run(5)
    if is_waited_for:
        job.training.put(store, ref=REF, step=5)
    else:
        job.training.put_async(store, ref=REF, step=5)
    job.run(5)
    again = Job(device, memory_format)
    torch.randn(100, device=device)
    again.training.restore(store, REF)
    again.run(5)
    assert different(again.model.state_dict(), job.values()) == []


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_gradients(device: torch.device, store: tsck.Store, is_waited_for: bool) -> None:
    job = Job(device, torch.contiguous_format)
    job.run(2)
    job.backward()
    put: Any = job.training.put if is_waited_for else job.training.put_async
    put(store, ref=REF, step=2, gradients=True)
    job.backward()
    job.step()
    again = Job(device, torch.contiguous_format)
    again.training.restore(store, REF)
    again.backward()
    again.step()
    assert different(again.model.state_dict(), job.values()) == []


@contextmanager
def group_of_device(device: torch.device) -> Iterator[None]:
    """A group of this process alone, over NCCL where there is a GPU."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_fsdp2_over_nccl(device: torch.device, store: tsck.Store, is_waited_for: bool) -> None:
    os.environ["LOCAL_RANK"] = "0"
    with group_of_device(device):
        model = nn.TransformerEncoderLayer(256, 4, 1024, device=device)
        fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def run() -> None:
            for _ in range(2):
                model(torch.randn(2, 8, 256, device=device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        def whole() -> dict[str, torch.Tensor]:
            return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}

        run()
        training = tsck.TrainingState(model=model, optimizer=optimizer)
        expected = clones(whole())
        if is_waited_for:
            training.put(store, ref=REF, step=1, group=dist.group.WORLD)
        else:
            training.put_async(store, ref=REF, step=1, group=dist.group.WORLD)
        run()
        training.restore(store, REF, group=dist.group.WORLD)
        assert different(whole(), expected) == []
