"""Checkpoints: a sealed dump of the ref table at one entry. Pure but for the table. Format: FORMAT.md, "Checkpoints".

A checkpoint is derived from the log, and not trusted more than the log. Readers ignore a checkpoint whose hash differs from its log
entry's, or that another version of the fold wrote. The same fold gives the same bytes on every host.
"""

import re
import struct
from itertools import chain, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.errors import CorruptObjectError, FormatVersionError, UnsupportedValueError
from tensorstore_ck.format.sealed import seal, unseal
from tensorstore_ck.log import table_rows
from tensorstore_ck.log.cache import Batch
from tensorstore_ck.log.field_checks import COUNT, DIGEST, PREFIX

_NUMBER: Final = re.compile(r"[0-9]{20}")
_KINDS: Final = {kind.prefix[len(PREFIX) :]: kind for kind in table_rows.IN_CHECKPOINTS}
_SIZES: Final = ("key_sizes", "value_sizes")


class Checkpoint(NamedTuple):
    """A decoded checkpoint."""

    n: int
    entry_hash: Digest
    keys: list[bytes]
    values: list[bytes]


def checkpoint_folder(log_prefix: str) -> str:
    """The folder of a log's checkpoints, with the slash."""
    return "checkpoint/" if log_prefix == "log" else f"{log_prefix}-checkpoint/"


def checkpoint_name(log_prefix: str, n: int) -> str:
    """The name of the checkpoint at entry `n`."""
    return f"{checkpoint_folder(log_prefix)}{n:020d}"


def checkpoint_number(name: str) -> int | None:
    """The entry of the checkpoint of that name; None for other names."""
    number = name.rpartition("/")[2]
    return int(number) if _NUMBER.fullmatch(number) else None


def dump(batch: Batch, n: int, entry_hash: Digest) -> bytes | None:
    """The sealed checkpoint of a table whose head is entry `n`; None if it would be larger than an object may be.

    Takes a batch, so that no process folds further entries during the dump.
    """
    items = [(key[len(PREFIX) :], value) for key, value in batch.scan(PREFIX) if key != table_rows.HEAD.prefix]
    body = {
        "n": n,
        "entry_hash": entry_hash,
        "fold": table_rows.FOLD_VERSION,
        "key_sizes": _sizes([key for key, _ in items]),
        "value_sizes": _sizes([value for _, value in items]),
        "keys": b"".join(key for key, _ in items),
        "values": b"".join(value for _, value in items),
    }
    try:
        return seal("checkpoint", body)
    except UnsupportedValueError:
        return None


def load(batch: Batch, checkpoint: Checkpoint) -> None:
    """Replaces the ref table in `batch`."""
    batch.clear(PREFIX)
    for key, value in zip(checkpoint.keys, checkpoint.values, strict=True):
        batch.put(PREFIX + key, value)
    table_rows.HEAD.put(batch, b"", table_rows.Head(checkpoint.n, checkpoint.entry_hash))


def decode_checkpoint(data: bytes, name: str) -> Checkpoint:
    """Decodes a checkpoint, every row of it.

    Raises:
        CorruptObjectError: not a checkpoint.
        FormatVersionError: written by another version of the format or of the fold.
    """
    body = unseal("checkpoint", data, name)
    sound = COUNT.accepts(body.get("n")) and DIGEST.accepts(body.get("entry_hash")) and COUNT.accepts(body.get("fold"))
    if sound and body["fold"] != table_rows.FOLD_VERSION:
        raise FormatVersionError(f"{name} was made by another version of the fold", object_id=name)
    if not sound or any(type(body.get(field)) is not bytes for field in (*_SIZES, "keys", "values")):
        raise CorruptObjectError(f"{name} is not a checkpoint that this build can use", object_id=name)
    if any(len(body[field]) % 4 for field in _SIZES) or len(body["key_sizes"]) != len(body["value_sizes"]):
        raise CorruptObjectError(f"{name}: the numbers of keys and values differ", object_id=name)
    key_sizes, value_sizes = (np.frombuffer(body[field], "<u4") for field in _SIZES)
    are_all = key_sizes.sum(dtype=np.int64) == len(body["keys"]) and value_sizes.sum(dtype=np.int64) == len(body["values"])
    if not are_all or np.count_nonzero(key_sizes == 0) > 1:
        raise CorruptObjectError(f"{name}: its keys and values do not have the listed sizes", object_id=name)
    checkpoint = Checkpoint(body["n"], body["entry_hash"], _pieces(body["keys"], key_sizes), _pieces(body["values"], value_sizes))
    ascending = all(before < after for before, after in pairwise(checkpoint.keys))
    if not ascending or not all(map(_is_row, checkpoint.keys, checkpoint.values)):
        raise CorruptObjectError(f"{name}: it has rows that are not of the ref table", object_id=name)
    return checkpoint


def _sizes(pieces: list[bytes]) -> bytes:
    return struct.pack(f"<{len(pieces)}I", *map(len, pieces))


def _pieces(joined: bytes, sizes: npt.NDArray[np.uint32]) -> list[bytes]:
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [joined[start:end] for start, end in zip(chain((0,), ends), ends, strict=False)]


def _is_row(key: bytes, value: bytes) -> bool:
    kind = _KINDS.get(key[:1])
    if kind is None or not kind.is_key(key[1:]):
        return False
    try:
        kind.check(value)
    except CorruptObjectError:
        return False
    return True
