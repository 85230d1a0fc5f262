"""A snapshot that is being restored: what whoever restores it may read of it, on this rank.

With ``group=`` all of it is read within one attempt of the ranks (`Groups.restore`): what fails on one rank ends it on all at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.engine.read.block_reader import read_blocks
from tensorstore_ck.engine.read.merged_snapshot import open_rank_state, open_snapshot
from tensorstore_ck.format.random_streams import RULE, Streams
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.session.group.process_groups import GroupReading

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from tensorstore_ck.state import LazySnapshot, LoadReport


class Restoring(NamedTuple):
    """One rank's view of it. torch is loaded only by what takes or returns tensors."""

    engine: Engine
    info: SnapshotInfo
    group: "ProcessGroup | None" = None
    reading: GroupReading | None = None
    """How it reads together with the others of `group`."""

    def lazy(self) -> "LazySnapshot":
        """What there is; reads no tensors."""
        from tensorstore_ck.state import LazySnapshot  # noqa: PLC0415 - loads torch

        return LazySnapshot(open_snapshot(self.engine, self.info))

    def checkout(
        self,
        *,
        into: object = None,
        select: Sequence[str] | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
        dtype: "torch.dtype | None" = None,
        device: "str | torch.device" = "cpu",
        report: "LoadReport | None" = None,
        broadcast: bool = False,
    ) -> Any:
        """See `Store.checkout`; once only, as the ranks of a host read together."""
        from tensorstore_ck.state import restore  # noqa: PLC0415 - loads torch

        group, reading = self.group, self.reading
        place = 0.0 if group is None else (group.rank() + 0.5) / group.size()
        content: SnapshotContent = open_snapshot(
            self.engine, self.info, reading.read_blocks if reading is not None else read_blocks, place=place
        )
        if broadcast and reading is not None and group is not None:
            from tensorstore_ck.state.broadcast_reads import BroadcastContent  # noqa: PLC0415 - loads torch.distributed

            content = BroadcastContent(content, group, reading.agree)
        return restore(
            content,
            into=into,
            select=select,
            strict=strict,
            rename=rename,
            dtype=dtype,
            device=device,
            report=report,
            group=group,
            unclaimed=reading.unclaimed if reading is not None else None,
        )

    def selected(self, *globs: str) -> Any:
        """What fits the globs, read by this rank alone."""
        from tensorstore_ck.state import restore  # noqa: PLC0415 - loads torch

        return restore(open_snapshot(self.engine, self.info), select=globs)

    def rank_state(self, rank: int) -> Any:
        """What a rank put as its own.

        Raises:
            NotFoundError: no rank states were put, or there is no such rank.
        """
        from tensorstore_ck.state import restore  # noqa: PLC0415 - loads torch

        return restore(open_rank_state(self.engine, self.info, rank))

    def streams(self) -> Streams:
        """See `Store.streams`."""
        rank, ranks = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        return Streams(self.info.root.hex(), rank, ranks, self.engine.read_record(self.info).streams or RULE)
