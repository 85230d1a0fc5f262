"""The parameters and buffers of all model parts as one module."""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan cannot be installed with the pinned fsspec: run `make test-apart`")

import torch
from torch import nn

from tensorstore_ck.integrations.titan.snapshot_manager import weights_of

pytestmark = pytest.mark.slow


class Part(nn.Module):
    """Tied weights, a buffer that is saved, and one that is not."""

    def __init__(self, name: str) -> None:
        super().__init__()
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.randn(3))
        layer.tied = layer.weight
        layer.register_buffer("seen", torch.tensor(1))
        layer.register_buffer("cache", torch.zeros(2), persistent=False)
        self.layers = nn.ModuleDict({name: layer})


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_parts_are_one_module(dtype: torch.dtype | None) -> None:
    parts = [Part("0"), Part("1")]
    weights = weights_of(parts, dtype)
    found = weights.state_dict()
    assert sorted(found) == sorted(f"layers.{number}.{name}" for number in (0, 1) for name in ("seen", "tied", "weight"))
    for name, tensor in (pair for part in parts for pair in part.state_dict().items()):
        expected = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)
    assert len([*weights.parameters()]) == 2, "tied parameters stay tied"


def test_a_buffer_that_is_replaced_later() -> None:
    part = Part("0")
    weights = weights_of([part])
    part.layers["0"].seen = torch.tensor(2)
    assert weights.state_dict()["layers.0.seen"] == 2
