"""An importer in a package of its own: `tsck import model_000400.npz --ref runs/old`, after `pip install examples/npz_importer`."""

import re
import zipfile
from pathlib import Path

import numpy as np

from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.integrations.importing import ForeignCheckpoint


def read_npz(path: str) -> ForeignCheckpoint | None:
    """The arrays of an ``.npz`` file, under their names; None for anything else. No pickles are read."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        if not all(name.endswith(".npy") for name in archive.namelist()):
            return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            state = {name: arrays[name] for name in arrays.files}
    except ValueError as exc:
        raise CorruptObjectError(f"{path} has an array that is not plain numbers: {exc}", object_id=path) from exc
    number = re.search(r"(\d+)$", Path(path).stem)
    return ForeignCheckpoint(state, step=int(number[1]) if number else None, metadata={"imported from": "npz"})
