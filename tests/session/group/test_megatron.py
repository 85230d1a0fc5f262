"""What Megatron-core's ``ShardedTensor`` describes, as boxes: layers along a prepended dim, tensor and pipeline parallel, replicas."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, opened

LAYERS: Final = 4


@dataclass
class ShardedTensor:
    """The fields of megatron.core.dist_checkpointing.ShardedTensor, of release 0.16, that tell what is held."""

    key: str
    data: torch.Tensor
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: tuple[int, int, int] = (0, 0, 0)
    prepend_axis_num: int = 0

    @classmethod
    def from_rank_offsets(
        cls, key: str, data: torch.Tensor, *rank_offsets: tuple[int, int, int], replica_id: tuple[int, int, int], prepend_axis_num: int = 0
    ) -> "ShardedTensor":
        """As Megatron's: (axis, number of this fragment, fragments) along each axis that is cut."""
        shape = [1] * prepend_axis_num + list(data.shape)
        offset = [0] * len(shape)
        for axis, fragment, fragments in rank_offsets:
            offset[axis] = fragment * shape[axis]
            shape[axis] *= fragments
        return cls(key, data, tuple(data.shape), tuple(shape), tuple(offset), replica_id, prepend_axis_num)


def boxes_of(sharded: Iterable[ShardedTensor]) -> dict[str, tsck.Boxes]:
    """By key: a rank may hold several boxes of one tensor. Which replica a box is of does not matter: all save theirs."""
    found: dict[str, list[tsck.Box]] = {}
    for each in sharded:
        local = each.data[(None,) * each.prepend_axis_num]
        found.setdefault(each.key, []).append(tsck.Box(local, each.global_shape, each.global_offset))
    return {key: tsck.Boxes(boxes) for key, boxes in found.items()}


@dataclass(frozen=True)
class Model:
    """Ranks as Megatron numbers them: tensor parallel ones are neighbours, then data parallel ones, then stages."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    has_replicas: bool = False
    """With what every data parallel rank, every tensor parallel one, or only the first stage has."""

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * self.pp

    def sharded(self, rank: int, fill: bool = True) -> list[ShardedTensor]:
        """A rank's sharded state dict."""
        tp, dp, pp = rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)
        full, found = full_state(), []

        def own(key: str, *cuts: tuple[int, int, int], replica_id: tuple[int, int, int], layer: int | None = None) -> None:
            data = full[key] if layer is None else full[key][layer]
            for axis, fragment, fragments in cuts:
                data = data.chunk(fragments, axis)[fragment]
            data = data.clone() if fill else torch.zeros_like(data)
            if layer is None:
                found.append(ShardedTensor.from_rank_offsets(key, data, *cuts, replica_id=replica_id))
                return
            shifted = [(axis + 1, fragment, fragments) for axis, fragment, fragments in cuts]
            stacked = ShardedTensor.from_rank_offsets(key, data, (0, layer, LAYERS), *shifted, replica_id=replica_id, prepend_axis_num=1)
            found.append(stacked)

        for layer in range(LAYERS * pp // self.pp, LAYERS * (pp + 1) // self.pp):
            own("layers.fc1", (0, tp, self.tp), replica_id=(0, 0, dp), layer=layer)
            own("layers.fc2", (1, tp, self.tp), replica_id=(0, 0, dp), layer=layer)
            if self.has_replicas:
                own("layers.norm", replica_id=(0, tp, dp), layer=layer)
        if self.has_replicas and pp == 0:
            own("embedding", (0, tp, self.tp), replica_id=(0, 0, dp))
        return found


def full_state(has_replicas: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"layers.fc1": (LAYERS, 16, 24), "layers.fc2": (LAYERS, 24, 16), "layers.norm": (LAYERS, 24), "embedding": (40, 24)}
    full = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    return full if has_replicas else {key: full[key] for key in ("layers.fc1", "layers.fc2")}


def put(folder: str, model: Model, is_async: bool) -> str:
    sharded = model.sharded(dist.get_rank())
    store = opened(folder, model.ranks)
    options: dict[str, Any] = {"expect": tsck.ANY, "group": GROUPS[model.ranks], "timeout_seconds": TIMEOUT_SECONDS}
    if not is_async:
        return store.put_snapshot({"model": boxes_of(sharded)}, ref="megatron", step=1, **options).root
    pending = store.put_snapshot_async({"model": boxes_of(sharded)}, ref="megatron", step=2, **options)
    for each in sharded:
        each.data.zero_()
    return pending.wait().root


def restore(folder: str, root: str, model: Model) -> None:
    rank = dist.get_rank()
    sharded = model.sharded(rank, fill=False)
    into = {"model": boxes_of(sharded)}
    opened(folder, model.ranks).checkout(root, into=into, group=GROUPS[model.ranks], strict=False, timeout_seconds=TIMEOUT_SECONDS)
    for own, expected in zip(sharded, model.sharded(rank), strict=True):
        assert torch.equal(own.data, expected.data), own.key  # Megatron's own tensors are filled


@pytest.mark.parametrize("model", [Model(tp=2, pp=2), Model(tp=2, dp=2, pp=2, has_replicas=True)])
@pytest.mark.parametrize("is_async", [False, True])
def test_of_any_parallelism_on_any_other(pool: Pool, folder: Path, model: Model, is_async: bool) -> None:
    (root,) = set(pool.run(put, str(folder), model, is_async, ranks=model.ranks))
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        found: dict[str, Any] = store.checkout(root)["model"]
        for key, full in full_state(model.has_replicas).items():
            assert torch.equal(found[key], full), key
    for other in (model, Model(tp=4, pp=2), Model(tp=1, dp=2, pp=2), Model(dp=2)):
        other = Model(other.tp, other.dp, other.pp, model.has_replicas)
        pool.run(restore, str(folder), root, other, ranks=other.ranks)


def put_with_gap(folder: str) -> str:
    local = torch.ones(2, 3)
    state = {"w": tsck.Box(local if dist.get_rank() == 0 else local[:0], (4, 3), (0, 0))}
    return opened(folder, 2).put_snapshot(state, ref="gap", group=GROUPS[2], timeout_seconds=TIMEOUT_SECONDS).root


def put_overlapping(folder: str) -> str:
    state = {"w": tsck.Box(torch.ones(3, 3), (4, 3), (dist.get_rank(), 0))}
    return opened(folder, 2).put_snapshot(state, ref="overlap", group=GROUPS[2], timeout_seconds=TIMEOUT_SECONDS).root


def test_boxes_that_leave_a_gap_or_overlap_are_refused(pool: Pool, folder: Path) -> None:
    for error in pool.ask(put_with_gap, str(folder), ranks=2):
        assert isinstance(error, tsck.StoreError)
        assert "no rank holds 6 of 12 elements of tensor 'w', of shape [4, 3]" in str(error)
    for error in pool.ask(put_overlapping, str(folder), ranks=2):
        assert isinstance(error, tsck.StoreError)
        assert "hold some elements twice of tensor 'w'" in str(error)
