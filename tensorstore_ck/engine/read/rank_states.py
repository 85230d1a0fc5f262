"""The states that the ranks of a snapshot saved as their own."""

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import raise_if_expired
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader, require_part_of_each_rank
from tensorstore_ck.errors import DamageError, MismatchError, NotFoundError
from tensorstore_ck.format.part import part_name
from tensorstore_ck.log import SnapshotRow


def count_rank_states(engine: Engine, info: SnapshotRow, world_size: int | None = None) -> int:
    """How many ranks saved a state of their own.

    Raises:
        NotFoundError: none.
        MismatchError: their number is not `world_size`.
    """
    record = engine.read_record(info)
    try:
        ranks = engine.read_part(record, 0).world_size  # its layout, which may be large, is not needed
    except DamageError as exc:
        raise_if_expired(engine.log, info, exc)
        raise
    require_part_of_each_rank(record, ranks, part_name(record.parts[0]))
    what = f"snapshot {info.root.hex()[:16]} (step {info.step})"
    if len(record.parts) == ranks:
        raise NotFoundError(f"{what} has no rank states: it was saved without rank_state=", object_id=info.root.hex())
    if world_size not in (None, ranks):
        raise MismatchError(
            f"{what} has the states of {ranks} ranks, and there are {world_size} now. Say whose each takes with rank_state_map=, seed "
            "new random streams with store.random_streams(), and keep a loader's position as a SampleCursor in the shared state",
            object_id=info.root.hex(),
        )
    return ranks


def open_rank_state(engine: Engine, info: SnapshotRow, rank: int) -> SnapshotReader:
    """The state that a rank saved as its own.

    Raises:
        NotFoundError: no rank states were saved, or there is no such rank.
    """
    ranks = count_rank_states(engine, info)
    if not 0 <= rank < ranks:
        what = f"snapshot {info.root.hex()[:16]} (step {info.step})"
        raise NotFoundError(f"{what} has the states of {ranks} ranks, and there is no rank {rank}", object_id=str(rank))
    return SnapshotReader(engine, info, ranks + rank)
