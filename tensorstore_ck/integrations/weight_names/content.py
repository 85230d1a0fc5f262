"""Converts a stored snapshot while it is read: the bytes of each new tensor are read where the old ones have them."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from tensorstore_ck.engine.interfaces import ByteTarget, SnapshotContent, WantedBox
from tensorstore_ck.engine.read.block_reader import BufferTarget
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.block_assignment import overlap, row_boxes
from tensorstore_ck.format.layout import Layout, TensorSpec
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.format.tree import Leaf, Tree, leaves, parse
from tensorstore_ck.integrations.weight_names.conversion import ConvertedTensor, TensorForm, plan_conversion, row_box
from tensorstore_ck.integrations.weight_names.names_file import WeightNames
from tensorstore_ck.state.rebuild_tree import UNSELECTED


def convert_content(names: WeightNames, content: SnapshotContent, tree: Tree) -> "tuple[ConvertedContent, Tree, list[str]]":
    """The tensors of a tree under the names of the other side, and the paths of the values that are not tensors.

    Raises `MismatchError`: see `plan_conversion`. Raises `UnsupportedValueError` if a tensor is a view of another one's memory.
    """
    tensors: dict[str, Leaf] = {}
    left_out = []
    for leaf in leaves(tree):
        if leaf.kind == "tensor":
            tensors[leaf.path] = leaf
        elif leaf.kind == "view":
            raise UnsupportedValueError(
                f"{leaf.path} is a view of another tensor's memory, whose names cannot be converted: export as safetensors first, and "
                "import that",
                object_id=leaf.path,
            )
        elif leaf is not UNSELECTED:
            left_out.append(leaf.path)
    specs = content.layout.tensors
    forms = {name: TensorForm(specs[leaf.index].shape, specs[leaf.index].dtype) for name, leaf in tensors.items()}
    converted = ConvertedContent(content, {name: leaf.index for name, leaf in tensors.items()}, plan_conversion(names, forms))
    return converted, parse(converted.layout, 0), left_out


class ConvertedContent:
    """`SnapshotContent` of the new tensors, in a flat dict."""

    def __init__(self, content: SnapshotContent, numbers: dict[str, int], tensors: dict[str, ConvertedTensor]) -> None:
        """`numbers`: of the old tensors, by name."""
        self._content, self._numbers = content, numbers
        self._tensors = list(tensors.values())
        item_bytes = {spec.dtype: spec.item_bytes for spec in content.layout.tensors}
        specs = [TensorSpec(name, form.dtype, item_bytes[form.dtype], form.shape) for name, (form, _) in tensors.items()]
        keys = list(tensors)
        self.layout = Layout(specs, ["d", keys, list(range(len(keys)))], spreads=["boxes"] * len(keys))
        """All in boxes: readers then ask for boxes, which are read in windows."""
        self.values: Sequence[Any] = ()

    def blob(self, index: int) -> bytes:
        """There are no values."""
        raise IndexError(index)

    def read(self, targets: Mapping[int, ByteTarget]) -> None:
        """Reads and verifies whole tensors."""
        for number, target in targets.items():
            spec = self.layout.tensors[number]
            memory = target.memory()
            data = memoryview(bytearray(spec.size_bytes)) if memory is None else memory
            self.read_boxes([WantedBox(number, BoxBounds((0,) * len(spec.shape), spec.shape), BufferTarget(data))])
            if memory is None:
                target.write(0, data)

    def read_boxes(self, wanted: Iterable[WantedBox]) -> None:
        """Reads and verifies boxes, each into the memory of its target. A box has whole rows, or lies within a row."""
        boxes = []
        for number, box, target in wanted:
            form, copies = self._tensors[number]
            memory, item_bytes = target.memory(), self.layout.tensors[number].item_bytes
            assert memory is not None, "exports read into memory"
            for copy in copies:
                whole = row_box(copy.target_index, copy.target_row, copy.rows, form.shape)
                common = overlap(whole, box)
                if common is None or 0 in common.sizes:
                    continue
                source = self._numbers[copy.source]
                first = row_box(copy.source_index, copy.source_row, copy.rows, self._content.layout.tensors[source].shape)
                shifts = [a - b for a, b in zip(common.offsets, whole.offsets, strict=True)][len(copy.target_index) :]
                stacked = len(copy.source_index)
                offsets = (*copy.source_index, *(a + b for a, b in zip(first.offsets[stacked:], shifts, strict=True)))
                sizes = (*(1,) * stacked, *common.sizes[len(copy.target_index) :])
                start = _element(common.offsets, box) * item_bytes
                part = memory[start : start + prod(common.sizes) * item_bytes]
                boxes.append(WantedBox(source, BoxBounds(offsets, sizes), BufferTarget(part)))
        self._content.read_boxes(boxes)

    def read_range(self, tensor: int, start: int, stop: int) -> bytearray:
        """Verified bytes [start, stop) of a tensor: whole elements."""
        spec, data = self.layout.tensors[tensor], bytearray(stop - start)
        at = 0
        for offsets, sizes in row_boxes(spec.shape, start // spec.item_bytes, stop // spec.item_bytes):
            size = prod(sizes) * spec.item_bytes
            self.read_boxes([WantedBox(tensor, BoxBounds(offsets, sizes), BufferTarget(memoryview(data)[at : at + size]))])
            at += size
        return data


def _element(offsets: Sequence[int], box: BoxBounds) -> int:
    """The number of an element within a box, row-major."""
    number = 0
    for offset, start, size in zip(offsets, box.offsets, box.sizes, strict=True):
        number = number * size + offset - start
    return number
