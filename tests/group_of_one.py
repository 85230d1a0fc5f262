"""torch's default process group in the process of the tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]


@contextmanager
def group_of_one() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
