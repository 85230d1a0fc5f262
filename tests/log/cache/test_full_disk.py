"""The cache on a disk that is full: an error, and memory instead, but no SIGBUS, which would end the training."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small_disk import needs_mount, small_disk

pytestmark = needs_mount

AT_EACH_PAGE = """
import os, shutil, sys
from pathlib import Path
import lmdb
from tensorstore_ck.log.cache import TableError
from tensorstore_ck.log.cache.lmdb_table import open_lmdb_table

disk, outcomes = Path(sys.argv[1]), set()

def leave_free(pages):
    free = os.statvfs(disk)
    with open(disk / "others", "wb") as others:
        if free.f_bavail > pages:
            os.posix_fallocate(others.fileno(), 0, (free.f_bavail - pages) * free.f_bsize)

def use(folder):
    try:
        folder.mkdir()
        table = open_lmdb_table(folder)
    except (OSError, lmdb.Error):
        return "refused"
    try:
        for number in range(40):
            with table.batch() as batch:
                batch.clear(b"r/a")
                for key in range(20):
                    batch.put(b"r/%d" % (key * number % 97), bytes(500))
            [*table.scan(b"r/")]
        return "whole"
    except TableError:
        return "full later"
    finally:
        table.close()

for pages in (*range(48), 900):
    (disk / "others").unlink(missing_ok=True)
    leave_free(pages)
    outcomes.add(use(disk / "cache"))
    shutil.rmtree(disk / "cache", ignore_errors=True)
print(sorted(outcomes))
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


def test_with_each_number_of_free_pages(disk: Path) -> None:
    done = subprocess.run([sys.executable, "-c", AT_EACH_PAGE, str(disk)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['full later', 'refused', 'whole']\n", "")
