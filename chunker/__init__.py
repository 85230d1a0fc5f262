"""Where one block ends and the next begins. Pure arithmetic over shapes and bytes; see README.md beside this file."""

from tensorstore_ck.chunker.content_defined import cut_opaque
from tensorstore_ck.chunker.tensor_grid import cut_box, cut_interval

__all__ = ["cut_box", "cut_interval", "cut_opaque"]
