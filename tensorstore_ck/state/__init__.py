"""States of torch: taken apart for the store, and put together again. Knows torch; knows no store, no log and no pack of anybody's.

`capture` makes a `layout.Captured` of a state, `restore` and `LazySnapshot` take a `layout.Content`; whatever writes and reads the bytes is
below. Nothing is pickled, nothing that a store names is imported or called, and what cannot come back exactly is refused.
"""

from tensorstore_ck.state.boxes import Box, Boxes
from tensorstore_ck.state.capture import capture
from tensorstore_ck.state.check import StateCheck, StateProblem, check_state, problems
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
    "problems",
    "register_type",
    "restore",
]
