"""Rejects a state that a reader would take for a decompression bomb."""

import numpy as np

from tensorstore_ck.common.ids import DIGEST_BYTES, ULID_BYTES
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.part import Part
from tensorstore_ck.format.sealed import FREE_BYTES, HEADER_BYTES, ParseBudget, check_msgpack


def require_readable(captured: CapturedState, part: Part, *, ranks: int, ranks_of_layout: int) -> None:
    """Rejects what a reader would take for a decompression bomb; all parts together stay below its limit.

    Raises:
        UnsupportedValueError: too many objects take almost no bytes in the store.
    """
    parsed = (value[2] for value in captured.values if type(value) is list and value[0] == "b" and value[1] == "m")
    bodies = [captured.layout.encode()[HEADER_BYTES:-DIGEST_BYTES], *(captured.blobs[number] for number in parsed)]
    budget = ParseBudget(FREE_BYTES // (2 * ranks))
    encoded_bytes = int(part.extents["stored"][: int(part.blobs["blocks"].sum())].sum(dtype=np.int64))
    # gc may re-encode the layout in fewer bytes: the reader will find at least a quarter of them.
    budget.add_stored(encoded_bytes // 4 + part.stored_bytes + (ULID_BYTES + DIGEST_BYTES) * ranks_of_layout)
    size_bytes = sum(map(len, bodies))
    if size_bytes <= budget.max_items(size_bytes):
        return  # even if each byte was an item
    try:
        for body in bodies:
            check_msgpack(memoryview(body), "the state", budget)
    except CorruptObjectError as exc:
        raise UnsupportedValueError(
            "the state has too many empty containers, tensors or sets for the few bytes that it takes: leave some out, or merge them"
        ) from exc
