"""Describes and compares snapshots; none of it loads torch.

show.py         `show`: metadata, tensors, values and stored size
diff.py         `diff`: changed tensors and values
contained.py    the part of a snapshot that comes from its base, by block ids
contents.py     tensors and values by name, of all layouts and rank states
"""

from tensorstore_ck.maintenance.describe.contents import blob_rows, names_of_blobs, part_prefix
from tensorstore_ck.maintenance.describe.diff import SnapshotDiff, TensorChange, ValueChange, diff_snapshots
from tensorstore_ck.maintenance.describe.show import describe, describe_with_costs

__all__ = [
    "SnapshotDiff",
    "TensorChange",
    "ValueChange",
    "blob_rows",
    "describe",
    "describe_with_costs",
    "diff_snapshots",
    "names_of_blobs",
    "part_prefix",
]
