"""One process of a host that uses a table as hard as it can: ``python -m tests.log.cache.hammer FOLDER SEED ROUNDS``.

Threads read, scan and write; the map grows; children are forked while threads are at it, and use the table, too; now and then the
files are removed as a process removes a damaged environment. Whatever `TableError` comes is fine; wrong values and signals are not.
"""

import faulthandler
import os
import random
import sys
import threading
from contextlib import suppress
from pathlib import Path

import lmdb

from tensorstore_ck.log.cache import Table, TableError
from tensorstore_ck.log.cache.lmdb_table import open_lmdb_table


def value_of(key: bytes) -> bytes:
    return key * (1 + key[-1] % 50)


def check(key: bytes, value: bytes | None) -> None:
    if value is not None and value != value_of(key):
        os.write(2, b"wrong value of %r\n" % key)
        os._exit(3)


def use(table: Table, draw: random.Random, rounds: int) -> None:
    for _ in range(rounds):
        with suppress(TableError):
            match draw.randrange(5):
                case 0:
                    key = b"%06d" % draw.randrange(5000)
                    check(key, table.get(key))
                case 1:
                    for key, value in table.scan(b"0%d" % draw.randrange(10), reverse=draw.random() < 0.5):
                        check(key, value)
                        if draw.random() < 0.01:
                            break
                case 2:
                    with table.batch(wait=draw.random() < 0.7) as batch:
                        for _ in range(draw.randrange(300)):
                            key = b"%06d" % draw.randrange(5000)
                            if draw.random() < 0.8:
                                batch.put(key, value_of(key))
                            else:
                                batch.delete(key)
                        if draw.random() < 0.1:
                            raise TableError("dropped", object_id="batch")
                case 4:
                    view = table.view(b"00")
                    items = list(view.scan(b"00"))
                    for key, value in items:
                        check(key, value)
                    if list(view.scan(b"00")) != items:
                        os.write(2, b"a view has changed\n")
                        os._exit(3)
                case 3:
                    with table.batch() as batch:
                        for key, value in batch.scan(b"00"):
                            check(key, value)


def remove(folder: Path) -> None:
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink(missing_ok=True)


def main() -> None:
    faulthandler.enable()
    folder, draw, rounds = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    for _ in range(rounds):
        try:
            table = open_lmdb_table(folder, map_bytes=1 << 16, patience_seconds=0.01)
        except (OSError, lmdb.Error):  # another one removed the files meanwhile: `open_table` takes memory then
            continue
        threads = [threading.Thread(target=use, args=(table, random.Random(draw.random()), 20)) for _ in range(3)]
        for thread in threads:
            thread.start()
        child = os.fork()
        if child == 0:
            use(table, draw, 5)
            own = open_lmdb_table(folder)
            use(own, draw, 5)
            own.close()
            os._exit(0)
        if draw.random() < 0.05:
            remove(folder)
        use(table, draw, 10)
        for thread in threads:
            thread.join()
        table.close()
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"the child ended with {status}")


if __name__ == "__main__":
    main()
