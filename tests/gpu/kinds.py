"""Tensors of every kind on a device, and how they are compared."""

from collections.abc import Iterator
from typing import Any, Final

import torch

STATE_SEED: Final = 7


def random_tensor(device: torch.device, *shape: int, seed: int = STATE_SEED) -> torch.Tensor:
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed))


def complex_tensor(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.complex(random_tensor(device, *shape), random_tensor(device, *shape, seed=STATE_SEED + 1))


def kinds(device: torch.device) -> dict[str, Any]:
    """A state with every kind of tensor. Sizes lie around those of blocks and of tensors that lie inside a part."""
    base = random_tensor(device, 1000, 1000)
    images = random_tensor(device, 4, 8, 16, 16)
    return {
        "float32": random_tensor(device, 300, 700),
        "bfloat16": random_tensor(device, 1000, 33).bfloat16(),
        "float16": random_tensor(device, 77).half(),
        "float64": random_tensor(device, 5, 5).double(),
        "int8": torch.arange(100, device=device).to(torch.int8),
        "bool": random_tensor(device, 100_000) > 0,
        "complex64": complex_tensor(device, 10, 10),
        "complex128": complex_tensor(device, 300, 40).to(torch.complex128),
        "float8_e4m3fn": random_tensor(device, 64, 640).to(torch.float8_e4m3fn),
        "float8_e5m2": random_tensor(device, 64, 65).to(torch.float8_e5m2),
        "conj": complex_tensor(device, 100, 100).conj(),
        "neg": complex_tensor(device, 10_000).conj().imag,
        "neg small": complex_tensor(device, 10).conj().imag,
        "conj transposed": complex_tensor(device, 70, 80).mH,
        "transposed": base.t(),
        "strided": base[::3, 5:900:2],
        "columns": base[:, 10:20],
        "expanded": random_tensor(device, 1, 1000).expand(300, 1000),
        "channels_last": images.to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3, device=device),
        "scalar": random_tensor(device, 1)[0],
        "large": random_tensor(device, 33 << 18),
        "odd": random_tensor(device, (9 << 20) + 3).to(torch.int8),
        "base": base,
        "alias": base[10:20],
        "parameter": torch.nn.Parameter(random_tensor(device, 10, 10)),
        "tiny": [random_tensor(device, 3, seed=number) for number in range(300)],
    }


def flat(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state by name."""
    if isinstance(state, torch.Tensor):
        yield name, state
    else:
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from flat(value, f"{name}.{key}")


def clones(state: Any) -> dict[str, torch.Tensor]:
    """The values of a state, on the CPU. Lazy views are resolved where they are: a copy to the CPU may drop the negative bit."""
    return {name: tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().clone() for name, tensor in flat(state)}


def zeros_like(state: Any) -> Any:
    """A state to restore into: dense tensors, without lazy bits."""
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype, device=state.device)
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return [zeros_like(value) for value in state]


def different(state: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that differ in a bit, a dtype or a shape."""
    found = clones(state)
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not _is_same(found[name], value)]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
