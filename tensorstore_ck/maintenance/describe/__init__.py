"""What `show` and `diff` tell of snapshots. Free of torch."""

from tensorstore_ck.maintenance.describe.contents import blob_rows, names_of_blobs, part_prefix
from tensorstore_ck.maintenance.describe.diff import SnapshotDiff, TensorChange, ValueChange, diff_snapshots
from tensorstore_ck.maintenance.describe.show import describe

__all__ = ["SnapshotDiff", "TensorChange", "ValueChange", "blob_rows", "describe", "diff_snapshots", "names_of_blobs", "part_prefix"]
