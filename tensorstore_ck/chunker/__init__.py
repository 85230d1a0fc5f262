"""Where one block ends and the next begins. Pure arithmetic over shapes and bytes; the rules are in README.md of this folder.

content_defined.py   cuts opaque bytes by their content (FastCDC)
tensor_grid.py       cuts a region of a tensor at a grid in global coordinates
"""

from tensorstore_ck.chunker.content_defined import cut_opaque
from tensorstore_ck.chunker.tensor_grid import cut_box, cut_interval

__all__ = ["cut_box", "cut_interval", "cut_opaque"]
