"""What `Store.log`, `branches` and `tags` return: a list and a dict of snapshots that notebooks show as tables."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tensorstore_ck.common.extras import missing_extra
from tensorstore_ck.common.html_table import GLANCE_ROWS, html_table
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.log.snapshot import COLUMNS, Snapshot

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


@short_errors
class SnapshotLog(list[Snapshot]):
    """Snapshots, newest first."""

    def __init__(self, snapshots: Iterable[Snapshot] = (), *, heads: Iterable[str] = (), abandoned: Iterable[str] = ()) -> None:
        super().__init__(snapshots)
        self.heads = frozenset(heads)
        """Ids of the snapshots where branches are."""
        self.abandoned = frozenset(abandoned)
        """Ids of those that training was taken back from, by `reset` or by a save that continues an earlier one."""

    def __repr__(self) -> str:
        count = f"{len(self)} snapshot{'' if len(self) == 1 else 's'}"
        return f"SnapshotLog({count}, newest {self[0]!r})" if self else "SnapshotLog(no snapshots)"

    def _repr_html_(self) -> str:
        metrics = sorted({name for snapshot in self for name in snapshot.metrics})
        rows = ([*snapshot.cells(), *(_number(snapshot.metrics.get(name)) for name in metrics)] for snapshot in self)
        return html_table(f"{len(self)} snapshots", [*COLUMNS, *metrics], rows)

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
