"""Differences of floats, sorted by the exponents of their base: by a small compiled kernel, or by numpy if that was not built.

Sorting takes most of the time: numpy needs an index of 8 bytes per element and reaches 0.2 GB/s of fp32; the kernel needs two passes.
"""

import sys

import numpy as np

from tensorstore_ck.format.codec.byte_split import Words, add_differences, bytes_of, zigzag_differences

try:
    if sys.byteorder != "little":
        raise ImportError("the kernel needs little-endian words")
    from tensorstore_ck.format.codec import _kernel
except ImportError:
    HAS_KERNEL = False
else:
    HAS_KERNEL = True


def sorted_differences(words: Words, base: Words) -> Words:
    """Zigzag differences of floats, stably sorted by the exponent of the base."""
    if not HAS_KERNEL:
        differences: Words = zigzag_differences(words, base, is_float=True)[np.argsort(exponents(base), kind="stable")]
        return differences
    into = np.empty_like(words)
    _kernel.take_differences(bytes_of(words), bytes_of(base), bytes_of(into), words.dtype.itemsize)
    return into


def add_sorted(base: Words, differences: Words, into: Words) -> None:
    """The inverse of `sorted_differences`."""
    if HAS_KERNEL:
        _kernel.add_differences(bytes_of(differences), bytes_of(base), bytes_of(into), into.dtype.itemsize)
        return
    unsorted = np.empty_like(differences)
    unsorted[np.argsort(exponents(base), kind="stable")] = differences
    add_differences(base, unsorted, into, is_float=True)


def exponents(words: Words) -> Words:
    """The exponents: the top bytes of the words rotated left by one bit."""
    top_bytes: Words = ((words << 1) >> (8 * words.dtype.itemsize - 8)).astype(np.uint8)
    return top_bytes
