"""Plain tensors and values that several ranks plan to write under one name: DCP stores one rank's copy, which all ranks then restore.

Plans contain no values. So each rank sends hashes of its copies along with its write results, and the coordinator compares them before it
publishes: all of them at a writer's first save; later values, small tensors and a rotating part of the others. Copies that differ
legitimately (a generator's state) look like errors (an unsynchronised buffer).
"""

import zlib
from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from tensorstore_ck.common.ids import block_id, derived_hash
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.integrations.dcp.byte_items import resolve_item
from tensorstore_ck.session.group.rank_messages import named_ranks
from tensorstore_ck.state.byte_sources import source_of
from tensorstore_ck.state.capture import require_dense

SMALL_BYTES: Final = 4 << 10
"""Tensors up to this size, such as the buffers of a norm, are compared in each save."""
RUN_BYTES: Final = 32 << 20
"""Hashed by one thread at a time, since threads that hash small tensors one by one mostly wait for each other."""
MAX_NAMED: Final = 4
ROW: Final = np.dtype([("name", "<u8"), ("content", "<u8")])


class DuplicateItems(NamedTuple):
    """The hashes of a rank's copies."""

    rank: int
    rows: bytes
    """A `ROW` for each hashed copy."""


class DifferingItem(NamedTuple):
    """A name under which ranks have different copies."""

    fqn: str
    winner: int
    """The rank whose copy is stored."""
    others: tuple[int, ...]
    """The ranks with a different copy."""


def local_items(plan: SavePlan | None, planner: SavePlanner) -> Sequence[WriteItem]:
    """The items that this rank planned, before DCP assigned each to one rank; from DCP's cache if it reuses plans."""
    if plan is None or not plan.usable:
        plan = SavePlanner._cached_save_plan.get(getattr(planner, "_cached_plans_key", ""))
    return plan.items if plan is not None else ()


def hash_copies(items: Sequence[WriteItem], planner: SavePlanner, turn: int | None) -> DuplicateItems | None:
    """Hashes this rank's copies; with a `turn` only a part of the larger tensors. None if there is only one rank."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks == 1:
        return None
    wanted = [item for item in items if item.type != WriteItemType.SHARD and (turn is None or _is_due(item, turn, ranks))]
    rows = np.zeros(len(wanted), ROW)

    def note(run: tuple[int, int]) -> None:
        for number in range(*run):
            content = _content(planner, wanted[number])
            if content:
                rows[number] = _number(wanted[number].index.fqn.encode()), int.from_bytes(content[:8], "little")

    runs = _runs(wanted)
    for_each(runs, note, min(len(runs), cpu_threads()))
    return DuplicateItems(dist.get_rank(), rows[rows["name"] != 0].tobytes())


def differences(copies: Sequence[DuplicateItems], fqns: Collection[str], writer_of: Callable[[str], int | None]) -> list[DifferingItem]:
    """The names with different copies, in the order of `fqns`. `writer_of`: the rank that wrote a name."""
    if len({copy.rows for copy in copies}) < 2:
        return []
    rows = np.concatenate([np.frombuffer(copy.rows, ROW) for copy in copies])
    ranks = np.repeat([copy.rank for copy in copies], [len(copy.rows) // ROW.itemsize for copy in copies])
    names, counts = np.unique(np.unique(rows)["name"], return_counts=True)
    wrong = set(names[counts > 1].tolist())
    differing = []
    for fqn in fqns if wrong else ():
        name = _number(fqn.encode())
        if name not in wrong:
            continue
        at = rows["name"] == name
        contents = dict(zip(ranks[at].tolist(), rows["content"][at].tolist(), strict=True))
        writer = writer_of(fqn)
        winner = writer if writer is not None and writer in contents else min(contents)
        differing.append(
            DifferingItem(fqn, winner, tuple(sorted(rank for rank, content in contents.items() if content != contents[winner])))
        )
    return differing


def explain(items: Sequence[DifferingItem]) -> str:
    """The message for a warning."""
    shown = "; ".join(f"{fqn!r}: that of rank {winner}, not that of {named_ranks(others)}" for fqn, winner, others in items[:MAX_NAMED])
    more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return (
        f"ranks have different copies under one name, DCP saves one of each, and all ranks will restore that ({shown}{more}). Give items "
        "of one rank their own name, such as 'rng.3'; synchronise buffers that each rank updates, as batch norm does; make "
        "parts of one tensor a DTensor"
    )


def _is_due(item: WriteItem, turn: int, ranks: int) -> bool:
    return _bytes_of(item) <= SMALL_BYTES or (zlib.crc32(item.index.fqn.encode()) + turn) % ranks == 0


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _runs(items: Sequence[WriteItem]) -> list[tuple[int, int]]:
    """Ranges of items, each hashed by one thread."""
    runs, first, size = [], 0, 0
    for number, item in enumerate(items, 1):
        size += _bytes_of(item)
        if size >= RUN_BYTES or number == len(items):
            runs.append((first, number))
            first, size = number, 0
    return runs


def _content(planner: SavePlanner, item: WriteItem) -> bytes:
    """The digest of this rank's copy; empty if it cannot be stored."""
    try:
        if item.type == WriteItemType.BYTE_IO:
            subtree = resolve_item(planner, item)
            return bytes(derived_hash("a rank's value", pack_body([subtree.node, subtree.values]), *map(block_id, subtree.blobs)))
        tensor: Any = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        tensor = tensor.detach()
        require_dense(tensor, item.index.fqn)
    except UnsupportedValueError:
        return b""  # the rank that writes it raises
    return bytes(block_id(source_of(tensor).read(0, tensor.nbytes)))


def _number(name: bytes) -> int:
    """A number for a name; never 0."""
    return int.from_bytes(block_id(name)[:8], "little") | 1
