"""Finds what a version changes in the followed tensors, then reads and stages that."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from tensorstore_ck.common.host_memory import require_memory
from tensorstore_ck.common.ids import Clock, Digest
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.read.block_reader import WantedBlock
from tensorstore_ck.engine.read.snapshot_reader import Layouts, open_snapshot
from tensorstore_ck.feed.followed_tensor import Change, FollowedTensor
from tensorstore_ck.feed.held_blocks import HeldBlocks, Place, place_of
from tensorstore_ck.feed.match_tensors import Wanted, match_tensors
from tensorstore_ck.feed.read_changes import ChangesReader
from tensorstore_ck.feed.shared_ranges import SharedRanges
from tensorstore_ck.log import SnapshotRow

LAYOUTS_BYTES: Final = 16 << 20
"""Of layouts that are kept, at most, unless one is larger."""


@dataclass(frozen=True, slots=True)
class FeedVersion:
    """A snapshot that a feed staged, or that its tensors are."""

    root: str
    """As in `Snapshot`; so are `step` and `time_ns`."""
    step: int | None
    time_ns: int
    clock: Clock = field(default=time.time_ns, repr=False, compare=False)

    @property
    def age_seconds(self) -> float:
        """Since it was made, by the clocks of this host and of the one that saved it."""
        return (self.clock() - self.time_ns) / 1e9


class StagedVersion(NamedTuple):
    """A version, and what makes the tensors that version."""

    version: FeedVersion
    tensors: Sequence[FollowedTensor]
    changes: Sequence[Change]
    ids: dict[Place, Digest]
    seconds: float
    """How long it took to stage."""
    read_bytes: int
    changed_bytes: int


class _Plan(NamedTuple):
    """What a version changes."""

    info: SnapshotRow
    what: str
    tensors: Sequence[FollowedTensor]
    blocks: Sequence[WantedBlock]
    held: HeldBlocks
    missing: Sequence[WantedBlock]
    is_known: bool
    """Whether the tensors were a version, instead of being hashed."""
    started: float


class VersionStager:
    """Stages versions for the tensors of one follower. Not thread-safe."""

    def __init__(self, engine: Engine, ref: str, wanted: Wanted) -> None:
        self._engine, self._ref, self._wanted = engine, ref, wanted
        self._layouts = Layouts(lambda: LAYOUTS_BYTES, len)
        """Versions mostly have the same one."""
        self._plan: _Plan | None = None
        self.ids: Mapping[Place, Digest] = {}
        """The blocks of the version that the tensors are; empty: not known, so that the next plan hashes the tensors."""

    def plan(self, info: SnapshotRow) -> None:
        """Finds what a version changes.

        Raises:
            MismatchError: the snapshot does not fit the tensors.
        """
        started = time.perf_counter()
        self._plan = None  # its memory is for this one
        content = open_snapshot(self._engine, info, layouts=self._layouts)
        what = f"{self._ref}, step {info.step}, root {info.root.hex()[:16]}"
        tensors, boxes = match_tensors(content, self._wanted, what)
        with on_own_streams(tensors):
            blocks = content.blocks_of(boxes)
            held = HeldBlocks(self.ids, blocks)
        self._plan = _Plan(
            info=info,
            what=what,
            tensors=tensors,
            blocks=blocks,
            held=held,
            missing=held.missing(blocks),
            is_known=bool(self.ids),
            started=started,
        )

    def reads(self) -> Digest:
        """Equal on ranks whose plans read the same bytes."""
        assert self._plan is not None
        return ChangesReader(self._plan.held).reads_of(self._engine, self._plan.missing)

    def read(self, shared: SharedRanges | None = None) -> StagedVersion:
        """Reads and stages what was planned; with `shared` together with other ranks, whose `reads` are the same.

        Raises:
            DamageError: stored data is damaged.
            SnapshotExpiredError: the snapshot was removed.
            NoSpaceError: what changes does not fit into the memory that is free.
        """
        plan, self._plan = self._plan, None
        assert plan is not None
        changed_bytes = sum(block.raw for block in plan.missing)
        if not plan.is_known:
            require_memory(
                changed_bytes, f"staging {plan.what}", "load the weights of a nearby version first, or follow less of it (select=)"
            )
        reader = ChangesReader(plan.held, shared)
        with on_own_streams(plan.tensors):
            reader(self._engine, plan.info, plan.missing)
        if reader.found_changed and plan.is_known:  # by somebody, perhaps also where no difference shows it
            info, self.ids = plan.info, {}
            del plan, reader  # their memory is for the second attempt
            self.plan(info)
            return self.read()
        return StagedVersion(
            version=FeedVersion(plan.info.root.hex(), plan.info.step, plan.info.time_ns, self._engine.clock),
            tensors=plan.tensors,
            changes=[change for tensor in plan.tensors for change in tensor.changes],
            ids={place_of(block): block.source.part.block_id(block.row) for block in plan.blocks},
            seconds=time.perf_counter() - plan.started,
            read_bytes=reader.read_bytes,
            changed_bytes=changed_bytes,
        )


def streams_of(tensors: Sequence[FollowedTensor]) -> list[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
    """Of each CUDA device of the tensors: the stream on which changes are made, and the current one of this thread."""
    devices = {tensor.tensor.device for tensor in tensors if tensor.tensor.is_cuda}
    return [(torch.cuda.default_stream(device), torch.cuda.current_stream(device)) for device in devices]


@contextmanager
def on_own_streams(tensors: Sequence[FollowedTensor]) -> Iterator[None]:
    """This thread reads tensors on the devices' own streams, as its helpers do: after the last swap, and after what it queued before."""
    with ExitStack() as stack:
        for own, callers in streams_of(tensors):
            own.wait_stream(callers)
            stack.enter_context(torch.cuda.stream(own))
        yield
