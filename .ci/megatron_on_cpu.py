"""Prepares Megatron-core for the scripts in this folder, on a machine without GPUs: the CPU replaces CUDA, and gloo replaces NCCL."""

import contextlib
import importlib.util
import types
import typing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

HERE = Path(__file__).resolve().parent


class Stream:
    """In place of a CUDA stream."""

    def wait_stream(self, other: object) -> None:
        """Nothing runs at the same time."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


def on_cpu(patience_seconds: float) -> None:
    """Called before Megatron is imported. A collective fails after `patience_seconds`."""
    place = HERE.parent / "tests" / "integrations" / "megatron" / "on_cpu.py"
    spec = importlib.util.spec_from_file_location("on_cpu", place)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    if not hasattr(typing, "override"):  # Megatron-LM since 0.17 is for Python 3.12
        vars(typing)["override"] = typing_extensions.override
    cuda: Any = torch.cuda
    cuda.device_count = lambda: 8
    cuda.set_device = lambda device: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.Stream = cuda.current_stream = lambda *_, **__: Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.empty_cache = lambda: None
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = cuda.max_memory_reserved = lambda device=None: 0
    cuda.memory_stats = lambda device=None: {}
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.get_device_properties = lambda device=None: types.SimpleNamespace(major=8, minor=0, total_memory=2**30)
    original = dist.init_process_group

    def init(backend: object = None, **options: Any) -> None:
        options.pop("device_id", None)
        original(backend="gloo", **{**options, "timeout": timedelta(seconds=patience_seconds)})

    dist.init_process_group = init
