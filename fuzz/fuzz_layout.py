"""Layouts, and the tree in them."""

import atheris
from _common import fuzz_sealed

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.format import tree
    from tensorstore_ck.format.layout import decode_layout


def read(data: bytes) -> None:
    layout = decode_layout(data, "a layout")
    assert decode_layout(layout.encoded, "a layout").tensors == layout.tensors
    for spec in layout.tensors:
        assert spec.size_bytes >= 0
    for values in range(8):
        leaves = list(tree.leaves(tree.parse(layout, values)))
        assert len({leaf.path for leaf in leaves}) == len(leaves)


if __name__ == "__main__":
    fuzz_sealed("layout", read)
