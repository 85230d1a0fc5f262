"""The compiled kernel, where there is one. Else, or if it was built from older sources, numpy does the same, only slower."""

import sys
from typing import Any

try:
    if sys.byteorder != "little":
        raise ImportError("the kernel needs little-endian words")
    from tensorstore_ck.format.codec._kernel import add_differences, apply_changes, find_changes, take_differences
except ImportError:
    HAS_KERNEL = False
    missing: Any = None
    add_differences = apply_changes = find_changes = take_differences = missing
else:
    HAS_KERNEL = True

__all__ = ["HAS_KERNEL", "add_differences", "apply_changes", "find_changes", "take_differences"]
