"""This process's rank, the number of ranks, their group, and what the first of them answers."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.session.group.process_groups import TIMEOUT_SECONDS, process_group
from tensorstore_ck.store.internals import groups_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tensorstore_ck.store import ReadOnlyStore


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def require_group(group: "ProcessGroup | DeviceMesh | None") -> "ProcessGroup | None":
    """Resolves ``group=``. Raises if it is missing with several ranks: the others' generators and positions would be lost."""
    rank, ranks = rank_and_world_size()
    if group is None and ranks > 1:
        raise InvalidOptionError(
            f"this is rank {rank} of {ranks}, and each rank has its own generators: call it on all ranks with group=dist.group.WORLD",
            object_id="group",
        )
    return process_group(group)


def ask_first_rank(
    store: "ReadOnlyStore",
    group: "ProcessGroup | None",
    title: str,
    answer: Callable[[], bytes],
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> bytes:
    """The first rank's answer, on all ranks; its error, if it has one. All ranks of `group` call this; `title` is for messages."""
    if group is None:
        return answer()
    return groups_of(store).broadcast(group, title, answer, timeout_seconds=timeout_seconds)
