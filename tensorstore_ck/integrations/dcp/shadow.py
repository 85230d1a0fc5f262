"""`ShadowWriter`: writes a DCP checkpoint and also a snapshot, to try out a store before relying on it.

The checkpoint comes first and is never at risk: any failure of the store is only a warning and part of the report. Each rank reads its
items back from the checkpoint's files, and compares them with its stored blocks, by their ids.
"""

import io
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tensorstore_ck.common.ids import block_id
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.engine.write.write_plan import places_of
from tensorstore_ck.integrations.dcp.byte_items import decode_item
from tensorstore_ck.integrations.dcp.dcp_save import Begun
from tensorstore_ck.integrations.dcp.plans import Tiny
from tensorstore_ck.integrations.dcp.target import CheckpointId
from tensorstore_ck.integrations.dcp.writer import Writer
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.state.rank_shares import concatenate_sources

_logger: Final = logging.getLogger(__name__)
T = TypeVar("T")


class ShadowWarning(UserWarning):
    """The snapshot of a checkpoint failed, or differs from it. The checkpoint is unharmed."""


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """A snapshot compared with a checkpoint of the same state."""

    snapshot: Snapshot | None
    """None: it failed; see `problem`."""
    compared_items: int
    differing: tuple[str, ...]
    """The names of items that are not bit-identical; if any, nothing is published."""
    problem: str
    """Why there is no snapshot; empty if there is one."""
    checkpoint_seconds: float
    """The time of the slowest rank to write its data."""
    snapshot_seconds: float
    """The time of the slowest rank to write its data."""
    checkpoint_bytes: int
    snapshot_bytes: int
    """Growth of the store."""


class _ShadowReport(NamedTuple):
    theirs: list[WriteResult]
    ours: list[WriteResult]
    seconds: tuple[float, float]
    compared: int
    differing: list[str]
    problem: str


@short_errors
class ShadowWriter(StorageWriter):
    """Writes with both: ``dcp.save(state, storage_writer=ShadowWriter(FileSystemWriter(path), Writer("./store", ref="runs/gpt")))``.

    On the coordinator, `report` is the `ShadowReport` of the last save, which is also logged.
    """

    def __init__(self, theirs: FileSystemWriter, ours: Writer) -> None:
        self._theirs = theirs
        self._ours = ours
        self._problem = ""
        self.report: ShadowReport | None = None

    # --- called by DCP, in this order ---------------------------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether it can be a checkpoint id."""
        return isinstance(checkpoint_id, str) and FileSystemWriter.validate_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """A new save begins."""
        self._theirs.reset(checkpoint_id)
        self._ours.reset(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """The checkpoint's storage meta."""
        return self._theirs.storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """On every rank."""
        self._problem = ""
        self._theirs.set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._guarded(lambda: self._ours.set_up_storage_writer(is_coordinator, *args, **kwargs))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """On every rank."""
        self._guarded(lambda: self._ours.prepare_local_plan(plan))
        return self._theirs.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator."""
        theirs = self._theirs.prepare_global_plan(plans)
        ours = self._guarded(lambda: self._ours.prepare_global_plan(plans)) or plans
        return [replace(one, storage_data=(one.storage_data, two.storage_data)) for one, two in zip(theirs, ours, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On every rank: writes the checkpoint, then the snapshot's part."""
        for_theirs, for_ours = plan.storage_data
        started = time.perf_counter()
        theirs = self._theirs.write_data(replace(plan, storage_data=for_theirs), planner)
        theirs.wait()
        between = time.perf_counter()
        written = self._guarded(lambda: self._ours.write(replace(plan, storage_data=for_ours), planner))
        ended = time.perf_counter()
        begun, results = written or (None, [])
        differing = None
        if begun is not None:
            differing = self._guarded(lambda: _differing(plan, writer=self._theirs, written=theirs.value(), begun=begun, results=results))
        seconds, compared = (between - started, ended - between), len(plan.items)
        report = _ShadowReport(theirs.value(), results, seconds, compared, differing=differing or [], problem=self._problem)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(""), 0, report)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: completes the checkpoint, then publishes the snapshot."""
        ranks: list[_ShadowReport] = [of_rank[0].storage_data for of_rank in results]
        self._theirs.finish(metadata, [rank.theirs for rank in ranks])
        differing = [name for rank in ranks for name in rank.differing]
        self._problem = next((rank.problem for rank in ranks if rank.problem), "")
        if differing and not self._problem:
            self._problem = f"{len(differing)} items differ from the checkpoint, {differing[0]!r} first"
        self._guarded(lambda: self._ours.finish(metadata, [rank.ours for rank in ranks]))
        snapshot = None if self._problem else self._ours.snapshot
        self.report = ShadowReport(
            snapshot=snapshot,
            compared_items=sum(rank.compared for rank in ranks),
            differing=tuple(differing),
            problem=self._problem,
            checkpoint_seconds=max(rank.seconds[0] for rank in ranks),
            snapshot_seconds=max(rank.seconds[1] for rank in ranks),
            checkpoint_bytes=sum(result.storage_data.length for rank in ranks for result in rank.theirs),
            snapshot_bytes=0 if snapshot is None else snapshot.new_bytes,
        )
        _logger.info("%s", self.report)
        if self._problem:
            warnings.warn(f"the checkpoint has no snapshot: {self._problem}", ShadowWarning, stacklevel=2)

    # --- the work -----------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], T]) -> T | None:
        """Calls `work` unless something has failed; keeps an error for the report."""
        if not self._problem:
            try:
                return work()
            except Exception as exc:  # noqa: BLE001 - a trial must never cost a checkpoint
                self._problem = f"{type(exc).__name__}: {exc}"
        return None


def _differing(
    plan: SavePlan, writer: FileSystemWriter, written: Sequence[WriteResult], begun: Begun, results: Sequence[WriteResult]
) -> list[str]:
    """The names of a rank's items whose bytes in the checkpoint differ from the stored ones; reads one tensor at a time."""
    files = _Files(writer, written)
    ours = {result.index: result.storage_data for result in results}
    byte_items = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
    differing = [
        item.index.fqn for item in byte_items if repr(decode_item(files.read_bytes(item), item.index.fqn)) != repr(ours[item.index])
    ]
    for item in plan.items:
        tiny = ours[item.index]
        if isinstance(tiny, Tiny):
            stored = concatenate_sources([files.read_tensor(item)])  # keeps the memory alive
            if stored.read(0, len(tiny.data)) != tiny.data:
                differing.append(item.index.fqn)
    boxes: dict[int, list[WriteItem]] = {}
    for item, number in zip(plan.items, begun.role.numbers, strict=True):
        if item.type != WriteItemType.BYTE_IO and item.tensor_data is not None and 0 not in item.tensor_data.chunk.sizes:
            boxes.setdefault(number, []).append(item)
    captured, layout = begun.captured, begun.captured.layout
    ids, inline = iter(begun.tensors.ids), io.BytesIO(begun.tensors.inline)
    read, source = -1, concatenate_sources(())
    for region, start, share in places_of(captured, begun.role.author, begun.block_bytes):
        if (tensor := region.tensor) != read:
            read, source = tensor, concatenate_sources([files.read_tensor(item) for item in boxes[tensor]])
        for length in share.lengths:
            data = source.read(start, start + length)
            is_same = data == inline.read(length) if share.is_inline else block_id(data) == next(ids)
            if not is_same and layout.tensors[tensor].name not in differing:
                differing.append(layout.tensors[tensor].name)
            start += length
    return differing


class _Files:
    """A rank's files of a checkpoint that is not complete yet."""

    def __init__(self, writer: FileSystemWriter, written: Sequence[WriteResult]) -> None:
        self._reader = FileSystemReader(writer.path)
        self._reader.fs, self._reader.path = writer.fs, writer.path
        metadata = Metadata({}, storage_data={result.index: result.storage_data for result in written})
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)

    def read_bytes(self, item: WriteItem) -> bytes:
        planner = _Planner(torch.empty(0))
        nothing = torch.Size(())
        self._read(ReadItem(LoadItemType.BYTE_IO, item.index, nothing, item.index, nothing, nothing), planner)
        return planner.found

    def read_tensor(self, item: WriteItem) -> torch.Tensor:
        assert item.tensor_data is not None
        sizes, start = item.tensor_data.chunk.sizes, torch.Size([0] * len(item.tensor_data.chunk.sizes))
        planner = _Planner(torch.empty(sizes, dtype=item.tensor_data.properties.dtype))
        self._read(ReadItem(LoadItemType.TENSOR, item.index, start, item.index, start, sizes), planner)
        return planner.target

    def _read(self, item: ReadItem, planner: "_Planner") -> None:
        self._reader.read_data(LoadPlan([item]), planner).wait()


class _Planner(DefaultLoadPlanner):
    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target
        self.found = b""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.target
