"""A file in a FUSE filesystem that logs what reaches it: `python -m tests.end_to_end.power.blocklog MOUNTPOINT LOG SIZE`.

``disk`` is a block device's worth of memory. Each write to it, each flush, and each note that is written to ``mark`` becomes one
record of the log: kind (1 byte), offset (8), length (4), bytes. Needs fusepy and libfuse 2.
"""

import errno
import stat
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

RECORD = struct.Struct("<cQI")


class Record(NamedTuple):
    kind: bytes
    """``W`` write, ``F`` flush, ``M`` mark."""
    offset: int
    data: bytes


def read_log(path: Path) -> list[Record]:
    data = path.read_bytes()
    records = []
    at = 0
    while at < len(data):
        kind, offset, length = RECORD.unpack_from(data, at)
        at += RECORD.size
        records.append(Record(kind, offset, data[at : at + length]))
        at += length
    return records


def serve(mountpoint: str, log_path: str, size: int) -> None:
    import fuse

    disk = bytearray(size)
    log = open(log_path, "wb", buffering=0)  # noqa: SIM115 - open as long as the process lives

    def note(kind: bytes, offset: int = 0, data: bytes = b"") -> None:
        log.write(RECORD.pack(kind, offset, len(data)) + data)

    class BlockLog(fuse.Operations):  # type: ignore[misc]
        def getattr(self, path: str, fh: Any = None) -> dict[str, int]:
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
            if path not in ("/disk", "/mark"):
                raise fuse.FuseOSError(errno.ENOENT)
            return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": size if path == "/disk" else 0}

        def readdir(self, path: str, fh: Any) -> list[str]:
            return [".", "..", "disk", "mark"]

        def read(self, path: str, length: int, offset: int, fh: Any) -> bytes:
            return bytes(disk[offset : offset + length])

        def write(self, path: str, data: bytes, offset: int, fh: Any) -> int:
            if path == "/mark":
                note(b"M", 0, data)
            else:
                disk[offset : offset + len(data)] = data
                note(b"W", offset, data)
            return len(data)

        def truncate(self, path: str, length: int, fh: Any = None) -> None:
            pass

        def fsync(self, path: str, datasync: Any, fh: Any) -> int:
            if path == "/disk":
                note(b"F")
            return 0

    fuse.FUSE(BlockLog(), mountpoint, foreground=True, nothreads=True, big_writes=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
