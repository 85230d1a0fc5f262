"""Takes torch states apart for the store and rebuilds them. Knows torch; `check` knows a backend too, `shared_parts` an engine and its log.

`capture` makes a `CapturedState`; `restore` and `LazySnapshot` read a `SnapshotContent`. Nothing is pickled, nothing that stored data
names is imported or called, and values that could not be restored exactly are refused.

capture.py              takes a state apart: tree, tensors, values
tensor_table.py         the tensors of a captured state, as columns; the layouts of a handle's last saves
stored_tensors.py       which leaves become tensors of the layout
aliasing.py             plans how tensors that share memory are stored
memory_extents.py       addresses of tensors and arrays
memory_order.py         the order of dims in memory: channels_last, transposed
plain_memory.py         checks that a tensor has memory of its own
byte_sources.py         reads and fills the bytes of tensors; converts dtypes at a restore
opaque_item.py          captures a value that is not part of a layout
unsupported_types.py    advice for values that cannot be stored
check.py                the dry run of a save
arena.py                reused host memory for captures
capture_copy.py         copies a captured state into host memory
device/                 tensors on CUDA devices: copies through pinned memory, ids of blocks
boxes.py                `Box`, `Boxes` and torch's `CheckpointableTensor`
sharded_tensors.py      `DTensor`, `ShardedTensor` and `FlatShard`
sourced_tensor.py       a tensor whose bytes are put together while they are read
rank_shares.py          a rank's share of a tensor, as bytes or as memory to fill
wrapper_subclasses.py   traceable wrapper subclasses of tensors
sharded_wrappers.py     DTensors over wrapper subclasses
registered_types.py     `register_type`, and the types that a state may hold
standard_types.py       types of the standard library, dataclasses and enums
torchao_types.py        torchao's classes
restore.py              validates the options of a restore and runs it
restore_into.py         restores into an existing state
match_target.py         compares stored leaves with a target's
stored_names.py         what a target finds by name, where keys do not lead to it
unplaced.py             positions of a target that keys do not lead to
fill_in_place.py        fills existing tensors
allocate.py             allocates new tensors; converts dtypes at a restore
optimizer_scalars.py    counters of optimizers, which `dtype=` does not convert
rebuild_tree.py         rebuilds containers and values
select.py               `select=` and `rename=`
load_report.py          reports what did not fit
lazy.py                 tensors of a snapshot, read when they are used
read_pieces.py          reads tensors piece by piece, as float64
statistics.py           statistics of tensors and of their changes
gloo_group.py           a gloo group of some ranks, outside torch's registry
broadcast_reads.py      one rank reads, the group's broadcast distributes
shared_parts.py         each part of a snapshot read once for all ranks of a group
"""

from tensorstore_ck.state.boxes import Box, Boxes
from tensorstore_ck.state.capture import capture
from tensorstore_ck.state.check import StateCheck, StateProblem, check_state
from tensorstore_ck.state.lazy import LazySnapshot, LazyTensor
from tensorstore_ck.state.load_report import LoadReport, LoadWarning, UnclaimedNames
from tensorstore_ck.state.registered_types import register_type
from tensorstore_ck.state.restore import restore
from tensorstore_ck.state.sharded_tensors import FlatShard

__all__ = [
    "Box",
    "Boxes",
    "FlatShard",
    "LazySnapshot",
    "LazyTensor",
    "LoadReport",
    "LoadWarning",
    "StateCheck",
    "StateProblem",
    "UnclaimedNames",
    "capture",
    "check_state",
    "register_type",
    "restore",
]
