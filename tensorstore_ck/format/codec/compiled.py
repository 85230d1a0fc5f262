"""The compiled kernel, `_kernel`: it does what the numpy form of split, merge, entropy coding and differences does, several times faster.

Without a compiler at installation, or on a big-endian machine, `HAS_KERNEL` is false.
"""

import sys

try:
    if sys.byteorder != "little":
        raise ImportError("the kernel needs little-endian words")
    from tensorstore_ck.format.codec import _kernel as kernel
except ImportError:
    HAS_KERNEL = False
else:
    HAS_KERNEL = True

__all__ = ["HAS_KERNEL", "kernel"]
