"""Describes and compares snapshots; only statistics of tensors load torch.

show.py         `show`: metadata, tensors, values and stored size
diff.py         `diff`: changed tensors and values
contained.py    which part of a snapshot is its base, by block ids
contents.py     tensors and values by name, of all layouts and rank states
statistics.py   minimum, mean, norm, NaN of tensors, and by how much they changed
"""

from tensorstore_ck.maintenance.describe.contents import blob_rows, names_of_blobs, part_prefix
from tensorstore_ck.maintenance.describe.diff import SnapshotDiff, TensorChange, ValueChange, diff_snapshots
from tensorstore_ck.maintenance.describe.show import describe, describe_with_costs
from tensorstore_ck.maintenance.describe.statistics import change_statistics, find_nan, statistics

__all__ = [
    "SnapshotDiff",
    "TensorChange",
    "ValueChange",
    "blob_rows",
    "change_statistics",
    "describe",
    "describe_with_costs",
    "diff_snapshots",
    "find_nan",
    "names_of_blobs",
    "part_prefix",
    "statistics",
]
