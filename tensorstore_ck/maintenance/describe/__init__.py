"""Describes and compares snapshots, without torch.

show.py         `show`: metadata, tensors, values and stored size
diff.py         `diff`: changed tensors and values
contents.py     tensors and values by name, of all layouts and rank states
group_costs.py  stored bytes and codecs per group of tensors
"""

from tensorstore_ck.maintenance.describe.contents import blob_rows, names_of_blobs, part_prefix
from tensorstore_ck.maintenance.describe.diff import SnapshotDiff, TensorChange, ValueChange, diff_snapshots
from tensorstore_ck.maintenance.describe.show import describe

__all__ = ["SnapshotDiff", "TensorChange", "ValueChange", "blob_rows", "describe", "diff_snapshots", "names_of_blobs", "part_prefix"]
