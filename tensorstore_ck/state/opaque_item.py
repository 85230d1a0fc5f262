"""Captures a value that another system passes as one opaque item, such as DCP: it becomes a subtree without a layout of its own.

Like `capture`, but tensors and arrays, which are few and small here, become values.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.layout import Node
from tensorstore_ck.format.tree import SUBTREE_TAG
from tensorstore_ck.format.values import move_to_blobs, numpy_dtype_name
from tensorstore_ck.state.byte_sources import Array, source_of
from tensorstore_ck.state.capture import CaptureWalk, require_dense
from tensorstore_ck.state.rank_shares import flags_of

MAX_TENSOR_BYTES: Final = 128 << 20


class OpaqueItem(NamedTuple):
    """A captured value, msgpack-able."""

    node: Node
    values: list[Any]
    blobs: list[bytes]

    def hole(self, blobs: list[bytes]) -> Any:
        """The encoded value for a hole. Its large values are appended to `blobs`."""
        first = len(blobs)
        blobs += self.blobs
        values = [["b", value[1], first + value[2]] if type(value) is list and value[0] == "b" else value for value in self.values]
        return values[0] if self.node is None else [SUBTREE_TAG, self.node, values]


def capture_value(value: object, name: str) -> OpaqueItem:
    """Captures the value at `name` of a state.

    Raises:
        UnsupportedValueError: a part of it cannot be stored; the message has its path.
    """
    return _ValueWalk().item(value, name)


class _ValueWalk(CaptureWalk):
    def item(self, value: object, name: str) -> OpaqueItem:
        self._visit(value, path=f"{name}.", nodes=self._top, position=0, depth=0)
        return OpaqueItem(self._top[0], self._values, self._blobs)

    def _visit_run(self, items: Sequence[Any], paths: Sequence[str], nodes: list[Any], start: int) -> int:
        return start

    def _visit_tensor(self, tensor: torch.Tensor, path: str, nodes: list[Any], position: int) -> None:
        try:
            self._add_bytes(require_dense(tensor, path[:-1]), tensor, path)
        except UnsupportedValueError as exc:
            self._refused(exc)

    def _visit_spread(self, value: Any, path: str, nodes: list[Any], position: int) -> None:
        self._fail(path[:-1], "a tensor in boxes within one value", "flatten the state, so that it is an item of its own")

    def _visit_array(self, array: Array, path: str, nodes: list[Any], position: int) -> None:
        dtype = numpy_dtype_name(array.dtype)
        if dtype is None:
            self._fail(path[:-1], f"its numpy dtype {array.dtype} has no stored form", "convert it with .tolist()")
            return
        self._add_bytes(f"np:{dtype}", array, path)

    def _add_bytes(self, dtype: str, tensor: torch.Tensor | Array, path: str) -> None:
        if tensor.nbytes > MAX_TENSOR_BYTES:
            advice = "flatten the state, so that it is an item of its own"
            self._fail(path[:-1], f"a tensor of {tensor.nbytes} bytes within one value", advice)
            return
        flags = flags_of(tensor) if isinstance(tensor, torch.Tensor) else 0
        data = bytes(source_of(tensor).read(0, tensor.nbytes))
        name = self._names.at(path)
        self._values.append(move_to_blobs(["tensor", dtype, list(tensor.shape), flags, data], name, self._blobs))
