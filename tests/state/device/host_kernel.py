"""The kernel's C, compiled for the CPU: a `BlockHasher` of host memory."""

import ctypes
import shutil
import subprocess
import threading
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest

from tensorstore_ck.common.ids import DIGEST_BYTES
from tensorstore_ck.state.device.kernel import Ids, Numbers, table_of

_SHARED_MEMORY = threading.Lock()
"""What the threads of a CTA share are static variables here."""


@cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    with as_file(files("tensorstore_ck.state.device").joinpath("block_ids.cu")) as source:
        built = Path(mkdtemp()) / "block_ids.so"
        command = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-DHOST", "-shared", "-fPIC", "-x", "c++", str(source), "-o", str(built)]
        subprocess.run(command, check=True)
    return ctypes.CDLL(str(built))


class Hashed:
    """`StartedHash` that was computed at once."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids

    def wait(self) -> Ids:
        return self._ids

    def hold_stream(self) -> None:
        pass


class HostHasher:
    """Runs the CTAs one after another, and each CTA's threads one after another, barrier by barrier."""

    def __init__(self) -> None:
        self._library = _library()
        self.hashed_bytes = 0

    def start(self, addresses: Numbers, sizes_bytes: Numbers) -> Hashed:
        return Hashed(self.hash(addresses, sizes_bytes))

    def hash(self, addresses: Numbers, sizes_bytes: Numbers) -> Ids:
        self.hashed_bytes += int(sizes_bytes.sum())
        table = table_of(addresses, sizes_bytes)
        columns = [ctypes.c_void_p(column.ctypes.data) for column in table]
        nodes, spare = np.full((2, len(table.block_of_group), DIGEST_BYTES), 0xA5, np.uint8)
        ids = np.full((len(sizes_bytes), DIGEST_BYTES), 0xFF, np.uint8)
        with _SHARED_MEMORY:
            for group in range(len(table.block_of_group)):
                self._library.hash_groups(group, *columns, ctypes.c_void_p(nodes.ctypes.data))
            for block in range(len(sizes_bytes)):
                self._library.merge_groups(block, columns[2], *(ctypes.c_void_p(each.ctypes.data) for each in (nodes, spare, ids)))
        return ids
