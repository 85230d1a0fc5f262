"""Whether the ranks of a group write into one store.

Copies of a store, such as a folder on each host's own disk, have the same UUID, so the ranks meet. Then each rank would write its part
where the others cannot read it.
"""

from collections.abc import Sequence
from typing import Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import InvalidOptionError, MissingObjectError
from tensorstore_ck.format.part import part_name
from tensorstore_ck.session.group.rank_messages import named_ranks

THREADS: Final = 16


def require_common_store(engine: Engine, parts: Sequence[Ulid], in_job: Sequence[int] | None = None) -> None:
    """Checks on rank 0 that it finds in the store the part of every rank, in their order. One request for each rank.

    Raises:
        InvalidOptionError: it does not find some of them.
    """
    missing: list[int] = []

    def look(rank: int) -> None:
        try:
            engine.backend.size(part_name(parts[rank]))
        except MissingObjectError:
            missing.append(rank)

    for_each(range(1, len(parts)), look, 1 if engine.backend.is_local else THREADS)
    if missing:
        who = named_ranks(sorted(missing), in_job)
        raise InvalidOptionError(
            f"rank 0 does not find in {engine.backend.url} what {who} wrote: the ranks have opened different folders, such as one on each "
            "host's own disk; open one that all hosts share",
            object_id=engine.backend.url,
        )
