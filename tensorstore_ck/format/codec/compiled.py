"""The compiled kernel, `_kernel`: it does what the numpy form of split, merge, entropy coding and differences does, several times faster,
copies and compares between many addresses, and asks torch about many tensors.

`HAS_KERNEL` is false without a compiler at installation, on a big-endian machine, and in a checkout that was updated after its kernel was
compiled, until it is installed again.
"""

import sys

try:
    if sys.byteorder != "little":
        raise ImportError("the kernel needs little-endian words")
    from tensorstore_ck.format.codec import _kernel as kernel

    newest = (
        "take_differences",
        "survey_words",
        "round_words",
        "compare_words",
        "apply_changes",
        "copy_memory",
        "compare_memory",
        "add_tensors",
    )
    if not all(hasattr(kernel, name) for name in newest):
        raise ImportError("the kernel was compiled from older sources")
except ImportError:
    HAS_KERNEL = False
else:
    HAS_KERNEL = True

__all__ = ["HAS_KERNEL", "kernel"]
