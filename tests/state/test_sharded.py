"""What is read off DTensors, ShardedTensors and flat shards: which local memory holds which box of the whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tensorstore_ck.errors import InvalidOptionError, UnsupportedValueError
from tensorstore_ck.format.sharding import BoxBounds, Mesh, Shard
from tensorstore_ck.state.rank_shares import RankShare
from tensorstore_ck.state.sharded_tensors import FlatShard, SpreadDescriber, group_ranks
from tests.group_of_one import group_of_one


@contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    """This process as one rank of a group that talks to nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def whole(*shape: int) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float32).view(shape)


def described(tensor: object, group: Any = None) -> RankShare:
    found = SpreadDescriber(group_ranks(group), dist.get_rank(group)).describe(tensor, "model.w")
    assert found is not None
    return found


def check_pieces(found: RankShare, local: torch.Tensor) -> None:
    """The pieces hold the values of `whole`, lie in `local`'s memory and make up all of it."""
    full = whole(*found.shape)
    for (offsets, sizes), piece in found.pieces:
        assert torch.equal(piece, full[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))])
        assert piece.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        assert not piece.requires_grad
    assert sum(piece.numel() for _, piece in found.pieces) == local.numel()


PLACEMENTS: list[Placement] = [Replicate(), TorchShard(0), TorchShard(1), TorchShard(-1), _StridedShard(0, split_factor=2)]


def test_dtensors_on_every_rank_of_a_2d_mesh() -> None:
    for rank in range(4):
        with world(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            describer = SpreadDescriber(group_ranks(None), dist.get_rank())
            for placements, shape in product(product(PLACEMENTS, repeat=2), ((8, 4), (5, 3), (1, 2), (0, 3))):
                tensor = distribute_tensor(whole(*shape).requires_grad_(), mesh, placements, src_data_rank=None)
                found = describer.describe(tensor)
                assert found is not None
                assert (found.shape, found.dtype, found.mesh) == (shape, torch.float32, Mesh((2, 2), (0, 1, 2, 3)))
                check_pieces(found, tensor._local_tensor)


def test_negative_dims_and_a_split_factor_of_one_are_plain() -> None:
    with world(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(whole(2, 4)[:, 2:], mesh, [_StridedShard(-1, split_factor=1)], run_check=False)
        assert described(tensor).placements == (Shard(1),)
        tensor._spec.placements = (TorchShard(-1),)
        assert described(tensor).placements == (Shard(1),)


def test_a_scalar_and_a_tensor_that_others_hold() -> None:
    with world(3, 4):
        mesh = init_device_mesh("cpu", (4,))
        scalar = described(distribute_tensor(torch.tensor(0.0), mesh, [Replicate()], src_data_rank=None))
        assert [piece.box for piece in scalar.pieces] == [BoxBounds((), ())]
        empty = described(distribute_tensor(whole(3), mesh, [TorchShard(0)], src_data_rank=None))
        assert (empty.shape, empty.pieces) == ((3,), ())
        elsewhere = described(distribute_tensor(whole(3), DeviceMesh("cpu", [2, 1]), [TorchShard(0)], src_data_rank=None))
        assert (elsewhere.mesh, elsewhere.pieces) == (Mesh((2,), (2, 1)), ())


def test_ranks_are_those_of_the_group() -> None:
    with world(3, 8):
        group = dist.new_group([1, 3, 5, 7])
        mesh = DeviceMesh("cpu", [[7, 3], [5, 1]])
        tensor = distribute_tensor(whole(4, 4), mesh, [TorchShard(0), TorchShard(1)], src_data_rank=None)
        found = described(tensor, group)
        assert found.mesh == Mesh((2, 2), (3, 1, 2, 0))
        check_pieces(found, tensor._local_tensor)
        other = dist.new_group([1, 3])
        with pytest.raises(
            UnsupportedValueError, match=r"model\.w is a DTensor on a mesh with global ranks 7, 5, which are not in the group"
        ):
            described(tensor, other)


def test_meshes_are_read_once() -> None:
    with world(0, 4):
        mesh = init_device_mesh("cpu", (4,))
        tensors = [distribute_tensor(whole(4), mesh, [TorchShard(0)], src_data_rank=None) for _ in range(2)]
        describer = SpreadDescriber(group_ranks(None), dist.get_rank())
        first, second = [describer.describe(tensor) for tensor in tensors]
    assert first is not None
    assert second is not None
    assert first.mesh is second.mesh


@contextmanager
def refused(match: str) -> Iterator[None]:
    with world(0, 8), pytest.raises(UnsupportedValueError, match=match) as caught:
        yield
    assert caught.value.object_id == "model.w"


def test_partial_is_refused() -> None:
    with refused(r"placement Partial\(sum\): its value is yet to be reduced.*redistribute"):
        described(DTensor.from_local(whole(4), init_device_mesh("cpu", (8,)), [Partial()], run_check=False))


def test_an_unknown_placement_is_refused() -> None:
    class Odd(TorchShard):
        pass

    with refused("which is unknown"):
        described(DTensor.from_local(whole(1), init_device_mesh("cpu", (8,)), [Odd(0)], run_check=False))


def test_a_local_tensor_of_another_size_is_refused() -> None:
    with refused(r"gives this rank \(1, 3\), but its local tensor has shape \(2, 3\)"):
        mesh = init_device_mesh("cpu", (8,))
        described(DTensor.from_local(whole(2, 3), mesh, [TorchShard(0)], run_check=False, shape=torch.Size((8, 3)), stride=(3, 1)))


def test_another_shard_order_is_refused() -> None:
    with refused("shard order"):
        mesh = init_device_mesh("cpu", (2, 4))
        tensor = distribute_tensor(whole(8, 2), mesh, [TorchShard(0), TorchShard(0)], src_data_rank=None)
        tensor._spec.shard_order = (ShardOrderEntry(0, (1, 0)),)
        described(tensor)


def test_pieces_that_torch_does_not_record_are_refused() -> None:
    """FSDP2 over expert and tensor parallelism, uneven: 9 rows in 2 and each in 3 are not 9 rows in 6."""
    placements = [_StridedShard(0, split_factor=4), TorchShard(0), TorchShard(0)]
    with refused("4 pieces of dim 0 cannot be equal"):
        described(distribute_tensor(whole(9, 2), init_device_mesh("cpu", (2, 2, 2)), placements, src_data_rank=None))
    with world(0, 8):
        tensor = distribute_tensor(whole(12, 2), init_device_mesh("cpu", (2, 2, 2)), placements, src_data_rank=None)
        check_pieces(described(tensor), tensor._local_tensor)


def test_other_tensors_are_not_described() -> None:
    describer = SpreadDescriber({}, 0)
    for value in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(2)), None, [1]):
        assert describer.describe(value) is None


def sharded(*shards: tuple[torch.Tensor, list[int]], size: tuple[int, ...]) -> Any:
    local = [LocalShard.from_tensor_and_offsets(tensor, offsets, rank=0) for tensor, offsets in shards]
    metadata = ShardedTensorMetadata(
        shards_metadata=[shard.metadata for shard in local],
        size=torch.Size(size),
        tensor_properties=TensorProperties(dtype=torch.float32),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


def test_sharded_tensor_whose_metadata_does_not_fit_is_refused() -> None:
    with world(0, 1):
        tensor = sharded((whole(6, 4), [0, 0]), size=(6, 4))
        tensor.local_shards()[0].tensor = whole(5, 4)
        with pytest.raises(UnsupportedValueError, match=r"model\.w is a ShardedTensor .*shard of sizes \(6, 4\) at \(0, 0\)"):
            described(tensor)
        tensor = sharded((whole(6, 4), [0, 0]), size=(6, 4))
        tensor.local_shards()[0].metadata.shard_offsets = [1, 0]
        with pytest.raises(UnsupportedValueError, match=r"at \(1, 0\)"):
            described(tensor)


def test_flat_shard() -> None:
    local = whole(2, 3)
    shard = FlatShard(local, torch.Size((4, 5)), 14)
    assert shard.local is local
    assert (type(shard.shape), shard.shape, shard.start) == (tuple, (4, 5), 14)
    FlatShard(torch.nn.Parameter(torch.ones(0)), (0,), 0)
    FlatShard(torch.ones(1), (), 0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: FlatShard(whole(6), (4, 5), 15), r"\[15, 21\) do not lie within the 20"),
        (lambda: FlatShard(whole(6), (4, 5), -1), r"\[-1, 5\) do not lie"),
        (lambda: FlatShard(whole(4, 4)[:, :2], (4, 5), 0), "not contiguous"),
        (lambda: FlatShard(whole(4).to_sparse(), (4, 5), 0), "not contiguous"),
        (lambda: FlatShard([1.0], (4, 5), 0), "local is a list"),  # type: ignore[arg-type]
        (lambda: FlatShard(whole(4), (-4, -5), 0), "negative"),
        (lambda: FlatShard(whole(4), (4.0, 5), 0), "whole numbers"),  # type: ignore[arg-type]
        (lambda: FlatShard(whole(4), (4, 5), 0.5), "whole numbers"),  # type: ignore[arg-type]
        (lambda: FlatShard(whole(4), 20, 0), "whole numbers"),  # type: ignore[arg-type]
    ],
)
def test_flat_shards_that_cannot_be(make: Callable[[], FlatShard], match: str) -> None:
    with pytest.raises(InvalidOptionError, match=match):
        make()


def fully_sharded(mesh: DeviceMesh, rows: int) -> DTensor:
    """The weight of a linear layer, column-parallel over "tp" and then given to FSDP2 over "dp"."""
    layer = torch.nn.Linear(3, rows, bias=False)
    layer.weight = torch.nn.Parameter(distribute_tensor(whole(rows, 3), mesh["tp"], [TorchShard(0)], src_data_rank=None))
    fully_shard(layer, mesh=mesh["dp"])
    assert isinstance(layer.weight, DTensor)
    return layer.weight


def test_fsdp2_over_tp() -> None:
    """Where its pieces are not what the placements say, the size of at least one rank's share shows it."""
    for rows, odd in ((8, False), (10, False), (11, False), (9, True), (17, True)):
        refusals = []
        for rank in range(8):
            with world(rank, 8):
                weight = fully_sharded(init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")), rows)
                try:
                    found = described(weight)
                except UnsupportedValueError as error:
                    refusals.append(str(error))
                    continue
                assert found.placements == (Shard(0, 2), Shard(0))
                if not odd:
                    check_pieces(found, weight.to_local())
        assert bool(refusals) == odd
        assert all("which gives this rank" in refusal for refusal in refusals)


def test_a_tensor_that_is_still_on_its_way_is_waited_for() -> None:
    with group_of_one():
        tensor = distribute_tensor(whole(8, 2), DeviceMesh("cpu", [0]), [TorchShard(0)])
        tensor._local_tensor = AsyncCollectiveTensor(tensor._local_tensor)
        found = described(tensor)
        check_pieces(found, tensor._local_tensor.elem)
        assert type(found.pieces[0].tensor) is torch.Tensor
