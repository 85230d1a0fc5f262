"""Byte items: DCP passes them as zips of torch.save; they are stored as native values."""

import io
import pickle
import re
import threading
from collections import defaultdict
from itertools import takewhile
from typing import Final

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.state.opaque_item import OpaqueItem, capture_value
from tensorstore_ck.state.registered_types import FACTORIES

_SAFE_GLOBALS: Final = [
    frozenset,
    defaultdict,
    *FACTORIES.values(),
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *(kind for kind in vars(np.dtypes).values() if isinstance(kind, type) and issubclass(kind, np.dtype)),
]
"""Types that must be registered with torch to be accepted with ``weights_only=True``."""
_loading: Final = threading.Lock()
"""torch's list of safe globals is one per process."""
_ZIPPING: Final = ("resolve_data", "transform_object")
"""The methods of torch's planner that zip an object."""


def resolve_item(planner: SavePlanner, item: WriteItem) -> OpaqueItem:
    """Captures a byte item of a plan. Raises `UnsupportedValueError` if it holds something that cannot be stored."""
    own_classes = takewhile(lambda cls: cls is not DefaultSavePlanner, type(planner).__mro__)
    if isinstance(planner, DefaultSavePlanner) and not any(name in vars(cls) for cls in own_classes for name in _ZIPPING):
        return capture_value(planner.lookup_object(item.index), item.index.fqn)  # zipping and unzipping takes three times as long
    resolved = planner.resolve_data(item)
    assert not isinstance(resolved, torch.Tensor)
    return decode_item(resolved, item.index.fqn)


def decode_item(data: io.BytesIO | bytes, fqn: str) -> OpaqueItem:
    """Captures a byte item. Raises `UnsupportedValueError` if it holds more than plain values, containers, tensors and arrays."""
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    stream.seek(0)
    try:
        with _loading, torch.serialization.safe_globals(_SAFE_GLOBALS):
            value = torch.load(stream, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as exc:
        named = re.search(r"GLOBAL (\S+)", str(exc))
        what = f"a {named[1]}" if named else "something that torch does not load with weights_only=True"
        raise UnsupportedValueError(
            f"cannot store {fqn}: it holds {what}, which only its own code can create; store its state_dict() or plain values instead",
            object_id=fqn,
        ) from exc
    return capture_value(value, fqn)


def torch_zip(value: object) -> bytes:
    """A value in the form that DCP's planners take."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
