"""A follower's tensors on a device: the changed elements are written there. The CPU plays the device."""

from typing import Any

import pytest
import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.feed import followed_tensor
from tensorstore_ck.feed.followed_tensor import Change, ChangedDeviceElements, ChangedRange
from tests.feed.versions import REF, follower, save

DTYPES: dict[torch.dtype, type[ChangedDeviceElements | ChangedRange]] = {
    torch.bfloat16: ChangedDeviceElements,
    torch.float8_e4m3fn: ChangedDeviceElements,
    torch.bool: ChangedDeviceElements,
    torch.uint16: ChangedDeviceElements,
    torch.complex64: ChangedDeviceElements,
    torch.complex128: ChangedRange,
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_changes_of_every_dtype_are_written_and_undone(dtype: torch.dtype, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).relu().to(dtype)
    trainer, memory = follower(backend := MemoryBackend()), torch.zeros(128, 64) if transposed else torch.zeros(64, 128)
    mine = memory.to(dtype).t() if transposed else memory.to(dtype)
    monkeypatch.setattr(followed_tensor, "is_on_device", lambda _: True)
    feed = follower(backend).follow(REF, into={"model": {"weights": mine}})
    save(trainer, {"model": {"weights": trained}}, 0)
    feed.poll()
    feed.swap()
    before = trained.clone()
    trained[::8, 3] = trained[1::8, 5]
    save(trainer, {"model": {"weights": trained}}, 1)
    feed.poll()
    applied, kind = list[Change](), DTYPES[dtype]
    apply = kind.apply

    def fail_after(change: Any) -> None:
        apply(change)
        applied.append(change)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, "apply", fail_after)
        with pytest.raises(KeyboardInterrupt):
            feed.swap()
    assert torch.equal(bits(mine), bits(before))
    feed.swap()
    assert torch.equal(bits(mine), bits(trained))
    assert {type(change) for change in applied} == {kind}
