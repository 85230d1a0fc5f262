"""The statistics of tensors, and of their changes; which of them must be read for that, is known without torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.read.snapshot_reader import open_snapshot
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.maintenance.describe.diff import diff_snapshots

if TYPE_CHECKING:
    from tensorstore_ck.state.statistics import ChangeStatistics, TensorStatistics


def statistics(engine: Engine, info: SnapshotInfo, select: Sequence[str] | None, bins: int) -> "list[TensorStatistics]":
    """See `Store.statistics`."""
    from tensorstore_ck.state.statistics import tensor_statistics  # noqa: PLC0415 - loads torch

    return tensor_statistics(open_snapshot(engine, info), select, bins)


def find_nan(engine: Engine, info: SnapshotInfo, select: Sequence[str] | None) -> str | None:
    """See `Store.find_nan`."""
    from tensorstore_ck.state.statistics import first_not_finite  # noqa: PLC0415 - loads torch

    return first_not_finite(open_snapshot(engine, info), select)


def change_statistics(engine: Engine, old: SnapshotInfo, new: SnapshotInfo, select: Sequence[str] | None) -> "list[ChangeStatistics]":
    """See `Store.change_statistics`."""
    from tensorstore_ck.state.statistics import change_statistics as compare  # noqa: PLC0415 - loads torch

    changed = [change.name for change in diff_snapshots(engine, old, new).tensors]
    return compare(open_snapshot(engine, old), open_snapshot(engine, new), changed, select)
