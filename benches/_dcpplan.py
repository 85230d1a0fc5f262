"""DCP's own planning for simulated FSDP ranks, in one process: the items of all ranks, its global plan, its metadata, a plan of reads."""

import pickle
import time
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from benches._model import make_layout
from tensorstore_ck.format.block_assignment import regions_of_rank
from tensorstore_ck.format.layout import Layout


def _chunks(layout: Layout, rank: int, ranks: int) -> Iterator[tuple[str, tuple[int, ...], ChunkStorageMetadata]]:
    for region in regions_of_rank(layout, rank, tuple(range(ranks))):
        spec = layout.tensors[region.tensor]
        yield spec.name, spec.shape, ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))


def local_plan(layout: Layout, rank: int, ranks: int) -> SavePlan:
    """As `create_local_plan` makes it of DTensors."""
    properties = TensorProperties(torch.float32)
    items = []
    for name, shape, chunk in _chunks(layout, rank, ranks):
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shape))
        items.append(WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data={spec.name: (spec.name,) for spec in layout.tensors})


def print_plans(several: list[int], width: int) -> None:
    heads = ["ranks", "gathered, MB", "unpickle, s", "global plan, s", "scattered, MB", "pickle, s", "metadata, MB", "unpickle, s"]
    print("|", " | ".join([*heads, "plan one rank's reads, s"]), "|\n" + "|---" * 9 + "|")
    for ranks in several:
        layout = make_layout(ranks, width)
        pickled = [pickle.dumps(local_plan(layout, rank, ranks)) for rank in range(ranks)]
        began = time.process_time()
        plans = [pickle.loads(each) for each in pickled]
        unpickled = time.process_time()
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, is_coordinator=True)
        global_plans, metadata = planner.create_global_plan(plans)
        planned = time.process_time()
        scattered = sum(len(pickle.dumps(plan)) for plan in global_plans)
        packed = time.process_time()
        written = pickle.dumps(metadata)
        del plans, global_plans, metadata, planner
        again = time.process_time()
        loaded = pickle.loads(written)
        read = time.process_time()
        for name, _, chunk in _chunks(make_layout(ranks - 8, width), ranks // 2, ranks - 8):
            stored = loaded.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            create_read_items_for_chunk_list(name, stored, [chunk])
        ready = time.process_time()
        sizes = [sum(map(len, pickled)) / 1e6, scattered / 1e6, len(written) / 1e6]
        print(
            f"| {ranks} | {sizes[0]:.0f} | {unpickled - began:.1f} | {planned - unpickled:.1f} | {sizes[1]:.0f} | {packed - planned:.1f} "
            f"| {sizes[2]:.0f} | {read - again:.1f} | {ready - read:.1f} |",
            flush=True,
        )
