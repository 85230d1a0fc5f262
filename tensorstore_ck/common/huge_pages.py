"""Private memory in huge pages, where the system has them.

One page fault provides 2 MiB instead of 4 KiB, and a request to a disk takes a limited number of pieces of memory: of small pages about
1 MiB, of huge ones the 4 MiB that the disk allows. `mmap.mmap(-1, size)` alone is shared memory, which usually has no huge pages.
"""

import contextlib
import mmap
from typing import Final

HUGE_PAGE_BYTES: Final = 2 << 20
_MADV_WIPEONFORK: Final = 18


def new_pages(size_bytes: int) -> mmap.mmap:
    """New memory of zeros. A forked child sees zeros or a copy in its place, and must not use it.

    A fork may copy its pages while the kernel uses them: O_DIRECT may write from it, but not read into it (open(2)).

    Raises:
        OSError, OverflowError: the system has no such memory.
    """
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Without WIPEONFORK the next write after a fork would copy every page, and the old ones would live as long as the child.
        for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
            with contextlib.suppress(OSError):  # an older kernel, or one without huge pages: slower
                pages.madvise(advice)
    return pages
