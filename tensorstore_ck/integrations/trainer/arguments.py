"""The store and the ranks that an adapter is given."""

import os

import torch.distributed as dist

from tensorstore_ck.store import Store
from tensorstore_ck.store import open as open_store


def opened(store: Store | str | os.PathLike[str]) -> Store:
    """The store; of a URL or path, where it is created if there is none."""
    return store if isinstance(store, Store) else open_store(store, create=True)


def all_ranks(*, also_one: bool = False) -> "dist.ProcessGroup | None":
    """The group of all ranks; None if there is one. `also_one`: a group of one rank is a group, since its parameters may be partitioned."""
    if not (dist.is_available() and dist.is_initialized()) or (dist.get_world_size() == 1 and not also_one):
        return None
    return dist.group.WORLD
