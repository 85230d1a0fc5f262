"""What `Store.log`, `branches` and `tags` return: a list and a dict of snapshots that notebooks show as tables."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, SupportsIndex, overload

from tensorstore_ck.common.extras import missing_extra
from tensorstore_ck.common.html_table import GLANCE_ROWS, html_table
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.log.snapshot import COLUMNS, Snapshot

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


@short_errors
class SnapshotLog(list[Snapshot]):
    """Snapshots, newest first."""

    def __init__(
        self, snapshots: Iterable[Snapshot] = (), *, heads: Mapping[str, Sequence[str]] | None = None, abandoned: Iterable[str] = ()
    ) -> None:
        super().__init__(snapshots)
        self.heads = dict(heads or {})
        """Id of a snapshot -> the branches that are there."""
        self.abandoned = frozenset(abandoned)
        """Ids of those that training was taken back from, by `reset` or by a save that continues an earlier one."""

    @overload
    def __getitem__(self, at: SupportsIndex, /) -> Snapshot: ...
    @overload
    def __getitem__(self, at: slice, /) -> "SnapshotLog": ...
    def __getitem__(self, at: "SupportsIndex | slice", /) -> "Snapshot | SnapshotLog":
        return self._with(super().__getitem__(at)) if isinstance(at, slice) else super().__getitem__(at)

    def __repr__(self) -> str:
        count = f"{len(self)} snapshot{'' if len(self) == 1 else 's'}"
        return f"SnapshotLog({count}, newest {self[0]!r})" if self else "SnapshotLog(no snapshots)"

    def _repr_html_(self) -> str:
        metrics = sorted({name for snapshot in self for name in snapshot.metrics})
        rows = ([*snapshot.cells(), *(_number(snapshot.metrics.get(name)) for name in metrics)] for snapshot in self)
        return html_table(f"{len(self)} snapshots", [*COLUMNS, *metrics], rows)

    def where(self, condition: str) -> "SnapshotLog":
        """The snapshots for which a condition holds, such as ``lr < 1e-4 and config.dropout = 0.1``, in the same order.

        The language is that of `Catalog.find` (docs/guides/catalog.md). Names are metrics, what the save passed as ``attributes=``, scalars
        of its metadata by path, ``epoch``, ``triggers`` and ``save_seconds``.

        Raises:
            InvalidOptionError: the condition is wrong; the message says where.
            NotFoundError: none of the snapshots has a metric or an attribute that the condition names.
        """
        from tensorstore_ck.log.snapshot_condition import SnapshotNames  # noqa: PLC0415 - most logs are not searched

        return self._with(filter(SnapshotNames(self, time.time_ns()).condition(condition), self))

    def sorted_by(self, name: str, *, descending: bool = False) -> "SnapshotLog":
        """The snapshots by a number: a metric, an attribute, ``step``, ``time``, ``age``, ``size`` or ``new_bytes``; those without it last.

        Raises:
            InvalidOptionError: it is a field that is no number.
            NotFoundError: none of the snapshots has it.
        """
        from tensorstore_ck.log.snapshot_condition import SnapshotNames  # noqa: PLC0415 - most logs are not sorted

        number, sign = SnapshotNames(self, time.time_ns()).number(name), -1 if descending else 1
        keys = {snapshot.id: number(snapshot) for snapshot in self}
        return self._with(sorted(self, key=lambda snapshot: (math.isnan(keys[snapshot.id]), sign * keys[snapshot.id])))

    def _with(self, snapshots: Iterable[Snapshot]) -> "SnapshotLog":
        return SnapshotLog(snapshots, heads=self.heads, abandoned=self.abandoned)

    def to_pandas(self) -> "DataFrame":
        """A row for each snapshot: its fields, ``time`` in UTC, and each metric as a column ``metrics.loss``, NaN where there is none.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd  # noqa: PLC0415 - an extra
        except ImportError as exc:
            raise missing_extra("pandas", "to_pandas()") from exc
        fields = ("root", "id", "ref", "parent", "mark", "reason", "logical_bytes", "new_bytes", "entry")
        columns = {name: [getattr(snapshot, name) for snapshot in self] for name in fields}
        frame = pd.DataFrame(columns, columns=fields)
        frame.insert(3, "step", pd.array([snapshot.step for snapshot in self], dtype="Int64"))
        frame.insert(4, "time", pd.to_datetime([snapshot.time_ns for snapshot in self], unit="ns", utc=True, errors="coerce"))
        for name in sorted({name for snapshot in self for name in snapshot.metrics}):
            frame[f"metrics.{name}"] = [snapshot.metrics.get(name, float("nan")) for snapshot in self]
        return frame


class SnapshotsByName(dict[str, Snapshot]):
    """Branches or tags, and the snapshot of each."""

    def _repr_html_(self) -> str:
        return self.table(f"{len(self)} names")

    def table(self, caption: str) -> str:
        """The names that were saved to last, as HTML."""
        newest = sorted(self.items(), key=lambda item: -item[1].entry)
        rows = ((name, *snapshot.cells()) for name, snapshot in newest)
        return html_table(caption, ["name", *COLUMNS], rows, GLANCE_ROWS)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
