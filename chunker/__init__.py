"""Where one block ends and the next begins. Pure arithmetic over shapes and bytes; see README.md beside this file."""

from tensorstore_ck.chunker.grid import cut_box, cut_interval
from tensorstore_ck.chunker.opaque import cut_opaque

__all__ = ["cut_box", "cut_interval", "cut_opaque"]
