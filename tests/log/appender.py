"""Run by test_processes in processes of its own: appends to a log on local files and prints what was acknowledged."""

import random
import sys
import time
from pathlib import Path

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.common.ids import ZERO_DIGEST, Digest, new_ulid
from tensorstore_ck.errors import ConflictError
from tensorstore_ck.log import Log, Op, RefTable
from tensorstore_ck.log.cache.lmdb_table import open_lmdb_table
from tests.log.scripted import UUID, put_op


def put_once(log: Log, ref: str, number: int, expected: Digest | None) -> int:
    """Moves `ref` from `expected` to a new snapshot."""

    def build(view: RefTable) -> list[Op]:
        current = view.branch(ref)
        if (current.root if current else None) != expected:
            raise ConflictError(f"{ref} has moved", object_id=ref)
        return [put_op(ref, number, step=number, parent=expected)]

    return log.append(build).n


def main(store: str, cache: str, worker: int, count: int, mode: str) -> None:
    """Each save goes to the worker's own branch, or to a shared one from exactly where it is."""
    table = open_lmdb_table(Path(cache))
    log = Log(LocalBackend(store), table, uuid=UUID, clock=time.time_ns, actor=f"worker-{worker}", new_id=new_ulid)
    ref = "runs/shared" if mode == "shared" else f"runs/{worker}"
    left = [worker * 10_000 + number for number in range(count)]
    while left:
        branch = log.view().branch(ref)
        expected = branch.root if branch else None
        if mode == "shared" and random.random() < 0.3:
            expected = ZERO_DIGEST  # where the branch never is
        try:
            print(put_once(log, ref, left[0], expected), left[0], flush=True)
            del left[0]
        except ConflictError:
            log.sync()
    table.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], worker=int(sys.argv[3]), count=int(sys.argv[4]), mode=sys.argv[5])
