"""A gloo group of some ranks outside torch's registry.

`torch.distributed.new_group` would need the ranks that are not in it, or derive its name from the other groups that each rank has made.
"""

from datetime import timedelta
from typing import Any


def connect_gloo(store: Any, rank: int, ranks: int, *, timeout_seconds: float) -> Any:
    """This rank's side of a gloo backend; returns when all have called this. The connections end with the returned object.

    `store`: a key-value store of torch in which only these ranks, and only for this group, have keys. `timeout_seconds`: how long a rank
    may take to come, and for each message.

    Raises:
        RuntimeError, OSError: they did not connect.
    """
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - not in all builds of torch

    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    # If ranks connect lazily, which the environment can request of torch, a late rank aborts the process that has given it up.
    options._devices = [gloo.create_default_device(lazy_init=False)]
    return gloo(store, rank, ranks, options)
