"""Which folder a path names: not another one that was made there since, even if that got the number of a deleted one."""

import ctypes
import os
import struct
from typing import Final

from tensorstore_ck.common.ids import derived_hash

_AT_FDCWD: Final = -100
_STATX_BTIME: Final = 0x800
_STATX_BYTES: Final = 256
_MASK: Final = struct.Struct("=I")
_BTIME: Final = struct.Struct("=qI")
_BTIME_OFFSET: Final = 80


def folder_identity(path: str) -> int:
    """A number for the folder: by its inode, and by the time when it was made where the filesystem knows that; 0 if there is none.

    It stays when the folder is renamed or its content changes. A copy has another one.
    """
    try:
        inode = os.stat(path).st_ino
    except OSError:
        return 0
    made_ns = _made_ns(path)
    return inode if made_ns is None else int.from_bytes(derived_hash("folder", f"{inode} {made_ns}".encode())[:7], "big")


def _made_ns(path: str) -> int | None:
    statx = getattr(ctypes.CDLL(None), "statx", None)  # os.stat has no such field on Linux
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, buffer) != 0:
        return None
    if not _MASK.unpack_from(buffer)[0] & _STATX_BTIME:
        return None
    seconds, nanoseconds = _BTIME.unpack_from(buffer, _BTIME_OFFSET)
    return int(seconds) * 1_000_000_000 + int(nanoseconds)
