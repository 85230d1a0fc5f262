"""The environment that decides whether a job resumes bit for bit: versions, devices, switches, and the job's layout.

Plain values, by name; a name that only one side has is ignored. Reads the few environment variables that libraries obey, but no host name,
path or user.
"""

import ctypes
import os
import platform
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from tensorstore_ck.training.random_generators import has_cuda

_KERNELS: Final = "kernels, and the order in which they add, differ between versions"
_DEVICES: Final = "devices differ in their kernels, and in how they split a sum"
_SWITCH: Final = "it decides which kernels are used"
_ROUNDING: Final = "it decides how products are rounded"
_THREADS: Final = "sums are split into as many parts as there are threads"
_COMMUNICATION: Final = "gradients of ranks are added in another order"

REASONS: Final[Mapping[str, str]] = {
    "python": "hashes and the module random may differ",
    "numpy": "its generators and kernels may differ",
    "torch": _KERNELS,
    "cuda": _KERNELS,
    "cudnn": _KERNELS,
    "cublas": _KERNELS,
    "nccl": _COMMUNICATION,
    "driver": "it compiles and schedules kernels",
    "gpus": f"{_DEVICES}; generators of devices that are gone are not restored",
    "cpu": _DEVICES,
    "cpu_capability": _DEVICES,
    "deterministic_algorithms": _SWITCH,
    "cudnn_deterministic": _SWITCH,
    "cudnn_benchmark": "kernels are chosen by measured speed, which varies",
    "matmul_precision": _ROUNDING,
    "convolution_precision": _ROUNDING,
    "reduced_precision_sums": _ROUNDING,
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS chooses its kernels by it",
    "NCCL_ALGO": _COMMUNICATION,
    "NCCL_PROTO": _COMMUNICATION,
    "OMP_NUM_THREADS": _THREADS,
    "MKL_NUM_THREADS": _THREADS,
    "threads": _THREADS,
    "interop_threads": "operations run in another order",
    "ranks": "gradients are averaged over other shares of a batch, in another order",
    "hosts": _COMMUNICATION,
    "mesh": _COMMUNICATION,
}
"""Captured name -> why a change can matter."""
_VARIABLES: Final = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_LOADED_ALREADY: Final = getattr(os, "RTLD_NOLOAD", None)


class EnvironmentChangedWarning(UserWarning):
    """A job resumes in an environment other than the saved one, so perhaps not bit for bit."""


def describe(ranks: int, meshes: Iterable[DeviceMesh] = ()) -> dict[str, Any]:
    """This process's environment. `meshes`: those of the model's parameters."""
    backends = torch.backends
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    has_gpu = has_cuda()
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": backends.cudnn.version() if has_gpu else None,  # type: ignore[no-untyped-call]
        "cublas": _cublas_version() if has_gpu else None,
        "nccl": _nccl_version() if has_gpu else None,
        "driver": _driver_version(),
        "gpus": ", ".join(torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())) if has_gpu else None,
        "cpu": _cpu_model(),
        "cpu_capability": backends.cpu.get_cpu_capability(),
        "deterministic_algorithms": _determinism(),
        "cudnn_deterministic": backends.cudnn.deterministic,
        "cudnn_benchmark": backends.cudnn.benchmark,
        "matmul_precision": backends.cuda.matmul.fp32_precision,
        "convolution_precision": backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "reduced_precision_sums": _reduced_precision_sums(),
        **{name: os.environ.get(name) for name in _VARIABLES},
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "ranks": ranks,
        "hosts": f"{ranks // int(local)} x {local} ranks" if local.isdecimal() and int(local) and ranks > 1 else None,
        "mesh": "; ".join(sorted({_mesh_text(mesh) for mesh in meshes})) or None,
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each name whose values differ: ``torch 2.12.0 -> 2.13.0 (...)``."""
    return [
        f"{name.replace('_', ' ') if name.islower() else name} {_text(old[name])} -> {_text(new[name])} ({reason})"
        for name, reason in REASONS.items()
        if name in old and name in new and old[name] != new[name]
    ]


def _text(value: object) -> str:
    return "none" if value is None else str(value)


def _determinism() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _reduced_precision_sums() -> str:
    matmul = torch.backends.cuda.matmul
    allowed = {"fp16": matmul.allow_fp16_reduced_precision_reduction, "bf16": matmul.allow_bf16_reduced_precision_reduction}
    return ", ".join(name for name, is_allowed in allowed.items() if is_allowed) or "off"


def _mesh_text(mesh: DeviceMesh) -> str:
    """``4x2 (dp, tp)``."""
    names = f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
    return "x".join(map(str, mesh.shape)) + names


def _nccl_version() -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


@cache
def _cublas_version() -> str | None:
    if _LOADED_ALREADY is None or not torch.version.cuda:
        return None
    try:
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.partition('.')[0]}", mode=_LOADED_ALREADY)
        numbers = [ctypes.c_int() for _ in range(3)]
        if any(library.cublasGetProperty(which, ctypes.byref(number)) for which, number in enumerate(numbers)):
            return None
    except (OSError, AttributeError):
        return None
    return ".".join(str(number.value) for number in numbers)


@cache
def _driver_version() -> str | None:
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _first_line("/proc/driver/nvidia/version"))
    return version[0] if version and torch.version.cuda else None


@cache
def _cpu_model() -> str:
    name = _first_line("/proc/cpuinfo", "model name").partition(":")[2].strip()
    return name or platform.processor() or platform.machine()


def _first_line(path: str, start: str = "") -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            return next((line for line in lines if line.startswith(start)), "")
    except OSError:
        return ""
