"""A save of many ranks, from the writer's own pieces, by docs/decisions/005-rank-0-commits-by-one-create.md: each rank writes its part
and checks it at its own head, and rank 0 commits for all, with the lowest anchor. A rank that gives up says so in the log first.

What ranks tell each other goes through objects under ``channel/``, so that it is explored as well.
"""

from typing import Final

import numpy as np

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.dedup import DedupIndex
from tensorstore_ck.engine.write.part_writer import write_part
from tensorstore_ck.engine.write.publish import condemned_of
from tensorstore_ck.engine.write.write_plan import PartAuthor
from tensorstore_ck.errors import MissingObjectError, SnapshotExpiredError
from tensorstore_ck.format.codec import Coding
from tensorstore_ck.format.part import Part, decode_part, part_name
from tensorstore_ck.format.record import Record, encode_metadata, record_name
from tensorstore_ck.log import Op, RefTable
from tensorstore_ck.log.cache import MemoryTable
from tests.gc.interleavings.actor import Actor, Process
from tests.gc.interleavings.scenes import FAILED, Verdict, captured

TXN: Final = Ulid(b"the transaction!")
PATIENCE: Final = 2
"""How often a rank looks for what it waits for, before it gives up."""


def rank(name: str, number: int, labels: str, *, ranks: int = 2, table: MemoryTable | None = None) -> Actor:
    """One rank of a save to branch ``ranks``; number 0 leads."""

    def run(process: Process) -> Verdict:
        engine = process.engine()
        engine.log.sync()
        ulid, part = _write_part(engine, number, ranks, labels)
        engine.log.sync()
        rescue(engine, engine.log.view(), ulid, [(ulid, part)])  # checked at this rank's own head
        engine.backend.put(f"channel/{number}", ulid)
        if number == 0:
            _lead(engine, ranks)
        return _outcome(engine)

    return Actor(name, run, table, (*FAILED, MissingObjectError, SnapshotExpiredError))


def rescue(engine: Engine, view: RefTable, snapshot: Ulid, parts: list[tuple[Ulid, Part]]) -> list[Op]:
    """What keeps gc from freeing what was condemned of these parts."""
    condemned = condemned_of(engine, view, [snapshot], parts)
    return [Op.rescue(condemned)] if condemned else []


def _write_part(engine: Engine, number: int, ranks: int, labels: str) -> tuple[Ulid, Part]:
    head = engine.log.view().head()
    author = PartAuthor(number, ranks, (number,), np.arange(ranks, dtype="<u2").tobytes())
    written = write_part(
        engine, captured(labels.split()), DedupIndex(engine, None), anchor=head.n if head else 0, author=author, coding=Coding("raw")
    )
    return written.ulid, written.part


def _lead(engine: Engine, ranks: int) -> None:
    parts = []
    for number in range(ranks):
        data = _wait(engine, f"channel/{number}")
        if data is None:
            return
        name = part_name(Ulid(data))
        parts.append((Ulid(data), decode_part(engine.backend.get(name, max_bytes=1 << 20), name)))
    ids = b"".join(part.part_id() for _, part in parts)
    record = Record("ranks", None, None, encode_metadata({}), {}, 0, [ulid for ulid, _ in parts], ids, 0, 0)
    snapshot, encoded = engine.new_id(), record.encode()
    engine.backend.put(record_name(snapshot), encoded)

    def build(view: RefTable) -> list[Op]:
        if view.outcome(TXN) is not None:
            return []
        anchor = min(part.anchor for _, part in parts)
        put = Op.put("ranks", snapshot, record, encoded, anchor=anchor, txn=TXN)
        return [put, *rescue(engine, view, snapshot, parts)]

    engine.log.append(build)


def _wait(engine: Engine, name: str) -> bytes | None:
    for _ in range(PATIENCE):
        try:
            return engine.backend.get(name, max_bytes=100)
        except MissingObjectError:
            continue
    return None


def _outcome(engine: Engine) -> Verdict:
    for _ in range(PATIENCE):
        engine.log.sync()
        found = engine.log.view().outcome(TXN)
        if found is not None:
            return Verdict(TXN, found.put)
    engine.log.append(lambda view: [] if view.outcome(TXN) else [Op.abort(TXN)])
    found = engine.log.view().outcome(TXN)
    assert found is not None
    return Verdict(TXN, found.put)
