"""An engine at a log that was folded without this host's cache; it neither follows the log nor writes.

fsck and repair read through it, so that a damaged or outdated cache does not mislead them.
"""

import uuid

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.log import Head, Log
from tensorstore_ck.log.block_index import BlockIndex
from tensorstore_ck.maintenance.fsck.check_log import LogCheck


class _FrozenLog(Log):
    """A log that stays at its fold."""

    def sync(self, known: Head | None = None, *, next_first: bool = False) -> Head:
        """The head of the fold."""
        return self.view().head() or Head(0, self.chain.genesis)


def read_only_engine(engine: Engine, check: LogCheck) -> Engine:
    """An engine over the same backend, with the ref table of `check`."""
    config = engine.config
    log = _FrozenLog(
        engine.backend,
        check.table,
        uuid=uuid.UUID(config.uuid).bytes,
        prefix=config.log,
        clock=engine.clock,
        actor="fsck",
        new_id=engine.new_id,
    )
    engine.placed.add_locations(check.view.locations())
    return Engine(
        backend=engine.backend,
        config=config,
        table=check.table,
        log=log,
        index=BlockIndex(check.table),
        clock=engine.clock,
        new_id=engine.new_id,
        placed=engine.placed,
    )
